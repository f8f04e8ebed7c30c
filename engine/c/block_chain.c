/* Hashes of a sequence's blocks: BLAKE2b (RFC 7693), 16 bytes, each keyed with the one before.
 *
 * The compression function is that of the RFC, for digests that need no more than one key block and
 * the data; words are little-endian, as are all machines that this runs on. */
#include <string.h>

#include "block_chain.h"

#define HASH_BYTES 16
#define BLOCK 128

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

#define ROTATE(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define MIX(a, b, c, d, x, y) \
    do { \
        v[a] += v[b] + (x), v[d] = ROTATE(v[d] ^ v[a], 32); \
        v[c] += v[d], v[b] = ROTATE(v[b] ^ v[c], 24); \
        v[a] += v[b] + (y), v[d] = ROTATE(v[d] ^ v[a], 16); \
        v[c] += v[d], v[b] = ROTATE(v[b] ^ v[c], 63); \
    } while (0)

static void compress(uint64_t h[8], const uint8_t *block, uint64_t total, int last) {
    uint64_t v[16], m[16];
    memcpy(m, block, BLOCK);
    memcpy(v, h, 64);
    memcpy(v + 8, IV, 64);
    v[12] ^= total;
    if (last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

void kvr_chain_hashes(const uint8_t *parent, const uint8_t *tokens, uint64_t count, uint64_t size,
                      uint8_t *block_hashes) {
    for (uint64_t i = 0; i < count; i++, tokens += size) {
        uint8_t block[BLOCK] = {0};
        uint64_t h[8], done = BLOCK, left = size;
        memcpy(h, IV, sizeof h);
        h[0] ^= 0x01010000u ^ (HASH_BYTES << 8) ^ HASH_BYTES;
        memcpy(block, parent, HASH_BYTES);
        compress(h, block, done, 0);
        for (const uint8_t *at = tokens; left; at += BLOCK) {
            uint64_t part = left < BLOCK ? left : BLOCK;
            memset(block, 0, BLOCK);
            memcpy(block, at, part);
            done += part, left -= part;
            compress(h, block, done, left == 0);
        }
        memcpy(block_hashes + HASH_BYTES * i, h, HASH_BYTES);
        parent = block_hashes + HASH_BYTES * i;
    }
}
