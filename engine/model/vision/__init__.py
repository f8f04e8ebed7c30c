"""Images in prompts of our own engine: Qwen3-VL's tower, which Qwen3.5 has too.

* `config`: what the files say of the tower, of pictures and of positions
* `pictures`: files of images to pixels, and to the patches that the tower reads
* `layout`: how many tokens an image is, where they are, and the positions that they turn by
* `tower`: patches to embeddings
* `embeddings`: those are kept by digest, and made beside the steps
* `rows`: what the rows of a batch have of them
* `steps`: what a runner does with a step whose sequences have images

Rules: positions follow from a request's tokens and images, never from what was computed before; an
image is encoded alone, so its embeddings do not depend on what else is there; `config`, `layout`
and `pictures` import no torch, for the API counts tokens by them.
"""
