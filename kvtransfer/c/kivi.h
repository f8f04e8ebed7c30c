/* Blocks of KV in four bits a number. cffi reads this file. */
#pragma once

#include <stdint.h>

enum { KVR_BFLOAT16 = 1, KVR_FLOAT32 = 2 };

/* What a block is: `pairs` times `run` matrices of keys, then as many of values, each
 * [block_size][head_dim] numbers of `kind`. block_size * head_dim is a multiple of 8. */

/* 1: `out` has the block in four bits. 0: it has numbers that are not finite, or too large to
 * compute with, and what is in `out` is of no use. It is as large as `kivi.coded_bytes` says. */
int kvr_kivi_encode(int kind, int64_t pairs, int64_t run, int64_t block_size, int64_t head_dim,
                    const uint8_t *block, uint8_t *out);

/* Whatever `coded` has, all of it is read, and all of `block` is written. */
void kvr_kivi_decode(int kind, int64_t pairs, int64_t run, int64_t block_size, int64_t head_dim,
                     const uint8_t *coded, uint8_t *block);
