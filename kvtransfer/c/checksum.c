/* XXH3 (Yann Collet, https://github.com/Cyan4973/xxHash) of inputs longer than 240 bytes: products
 * of stripes of 64 bytes are added up in eight sums, which are mixed after each 16 stripes. */
#include "checksum.h"

#include <stddef.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { LANES = 8, STRIPE = 64, STRIPES = 16, SECRET = 192 };

#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87u

static const uint64_t START[LANES] = {
    0xC2B2AE3D,         PRIME64_1,  0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, PRIME32_1,
};

static const uint8_t KEYS[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t load(const uint8_t *at) {
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

#ifdef __AVX2__
typedef struct {
    __m256i low, high;
} Sums;

static inline __m256i load_half(const uint8_t *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

static inline __m256i add_half(__m256i sums, __m256i data, __m256i key) {
    __m256i mixed = _mm256_xor_si256(data, key);
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sums, _mm256_add_epi64(product, neighbours));
}

static inline void add_stripe(Sums *sums, const uint8_t *data, const uint8_t *key) {
    sums->low = add_half(sums->low, load_half(data), load_half(key));
    sums->high = add_half(sums->high, load_half(data + 32), load_half(key + 32));
}

static inline __m256i mix_half(__m256i sums, __m256i key) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47));
    mixed = _mm256_xor_si256(mixed, key);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

static inline void mix(Sums *sums) {
    sums->low = mix_half(sums->low, load_half(KEYS + SECRET - STRIPE));
    sums->high = mix_half(sums->high, load_half(KEYS + SECRET - STRIPE + 32));
}

static inline Sums start(void) {
    const uint8_t *at = (const uint8_t *)START;
    return (Sums){load_half(at), load_half(at + 32)};
}
#else
typedef struct {
    uint64_t lanes[LANES];
} Sums;

static inline void add_stripe(Sums *sums, const uint8_t *data, const uint8_t *key) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t number = load(data + 8 * lane), mixed = number ^ load(key + 8 * lane);
        sums->lanes[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
        sums->lanes[lane ^ 1] += number;
    }
}

static inline void mix(Sums *sums) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t sum = sums->lanes[lane];
        uint64_t key = load(KEYS + SECRET - STRIPE + 8 * lane);
        sums->lanes[lane] = (sum ^ (sum >> 47) ^ key) * PRIME32_1;
    }
}

static inline Sums start(void) {
    Sums sums;
    memcpy(sums.lanes, START, sizeof START);
    return sums;
}
#endif

static uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash(const uint8_t *data, size_t size) {
    Sums sums = start();
    size_t left = (size - 1) / STRIPE; /* stripes but for the last, which may overlap */
    const uint8_t *at = data;
    for (; left >= STRIPES; left -= STRIPES, at += STRIPES * STRIPE) {
        for (int stripe = 0; stripe < STRIPES; stripe++)
            add_stripe(&sums, at + stripe * STRIPE, KEYS + 8 * stripe);
        mix(&sums);
    }
    for (size_t stripe = 0; stripe < left; stripe++)
        add_stripe(&sums, at + stripe * STRIPE, KEYS + 8 * stripe);
    add_stripe(&sums, data + size - STRIPE, KEYS + SECRET - STRIPE - 7);
    uint64_t lanes[LANES], found = size * PRIME64_1;
    memcpy(lanes, &sums, sizeof lanes);
    for (int lane = 0; lane < LANES; lane += 2) {
        const uint8_t *key = KEYS + 11 + 8 * lane;
        found += folded_product(lanes[lane] ^ load(key), lanes[lane + 1] ^ load(key + 8));
    }
    found = (found ^ (found >> 37)) * 0x165667919E3779F9u;
    return found ^ (found >> 32);
}

void kvr_checksum_blocks(const uint8_t *pool, const int64_t *block_ids, int64_t count,
                         int64_t num_heads, int64_t bytes_per_head, const uint64_t *weights,
                         uint64_t *sums) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *block = pool + block_ids[i] * num_heads * bytes_per_head;
        uint64_t sum = 0;
        for (int64_t head = 0; head < num_heads; head++)
            sum += weights[head] * hash(block + head * bytes_per_head, (size_t)bytes_per_head);
        sums[i] = sum;
    }
}
