/* Hashes of a sequence's blocks. cffi reads this file. */
#pragma once

#include <stdint.h>

/* block_hashes[i] = BLAKE2b-128(tokens of block i, key = block_hashes[i - 1]); before the first one
 * comes `parent`. `tokens`: count * size bytes, size > 0. */
void kvr_chain_hashes(const uint8_t *parent, const uint8_t *tokens, uint64_t count, uint64_t size,
                      uint8_t *block_hashes);
