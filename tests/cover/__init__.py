"""Combinations of what a server may be asked for, each served by a small cluster of one process.

settings: what there is, and which pairs the support matrix refuses. rows: arrays in which every
pair (or three) of values is in some row. checkpoints: tiny random models of each kind. requests:
the mix that each cluster gets. serve: a row, from its start to what it leaves. refused: pairs that
have to be refused in the words of the matrix.

    python -m tests.cover                        # all rows
    python -m tests.cover --row 'model=latent computes=ranks'
    python -m tests.cover --of 3 --seed 1        # rows for all combinations of three
"""
