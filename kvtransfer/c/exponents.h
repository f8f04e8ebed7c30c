/* Blocks of KV made smaller without loss. cffi reads this file. */
#pragma once

#include <stdint.h>

/* What `kvr_encode_block` writes at most: a block that does not become smaller is kept as it is. */
enum { KVR_MORE_BYTES = 8 };

/* How many bytes of `out` the block takes, which has room for size + KVR_MORE_BYTES. */
int64_t kvr_encode_block(const uint8_t *block, int64_t size, uint8_t *out);

/* 1: `block` is filled from the `room` bytes at `coded`, more of which may follow what was encoded.
 * 0: they are not of a block of that size, and what is in `block` is of no use. */
int kvr_decode_block(const uint8_t *coded, int64_t room, uint8_t *block, int64_t size);
