/* Checksums of KV blocks on a CPU. cffi reads this file. */
#pragma once

#include <stdint.h>

/* sums[i] = the sum over the heads h of block block_ids[i] of weights[h] * XXH3-64(bytes of h), mod
 * 2^64. A block is num_heads runs of bytes_per_head > 240 bytes, one behind the other. */
void kvr_checksum_blocks(const uint8_t *pool, const int64_t *block_ids, int64_t count,
                         int64_t num_heads, int64_t bytes_per_head, const uint64_t *weights,
                         uint64_t *sums);
