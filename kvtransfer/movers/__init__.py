"""What copies KV: movers (`kvtransfer.agent`), and what they are made of.

nixl, ranks          memory, this worker's and its peers'; of workers of several ranks
disk, coded, staged  slots of a file; in fewer bytes; for a GPU that no disk reaches
object, packed, left a bucket; memory in four bits; memory of workers that have died
opening, disk_tier   a tier from its settings: its mover and its store
pool, metadata, checksum_kernels, nixl_bindings   memory as bytes, NIXL, and a GPU's sums
"""
