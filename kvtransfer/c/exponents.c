/* A block is numbers, which are cut into symbols, the bits that tell the size of a number, and the
 * rest. Each run of RUN numbers has its own most frequent symbols. Two bits say
 * which of the first three a symbol is, or that it is another; of the others, two bits more which
 * of the next three; once again; and what is left has a byte. So all but few are unpacked many at
 * a time.
 *
 * Bytes of a coded block: the kind of its numbers, or 0 if the block is kept as it is, and 7 that are
 * 0; the rest of all numbers, run by run; for each run the nine symbols, how many of its numbers
 * have none of the first 3, 6 and 9 (2 bytes each), one that is 0, the packed codes of each level,
 * and the symbols that are left. */
#include "exponents.h"

#include <string.h>
#ifdef __SSSE3__
#include <immintrin.h>
#endif

enum {
    HEADER = KVR_MORE_BYTES,
    RUN = 2048,
    PAD = 64, /* vectors may read and write so much behind a run */
    OTHER = 3,
    LEVELS = 3,
    SYMBOLS = OTHER * LEVELS,
    HEAD = 16, /* of a run */
    SAMPLED = 4, /* runs that tell the kind of numbers */
};

enum { FLOAT8 = 1, BFLOAT16, FLOAT16, FLOAT32, KINDS };

static const int WIDTHS[KINDS] = {0, 1, 2, 2, 4}; /* bytes of a number */

typedef struct {
    uint8_t symbols[SYMBOLS];
    uint16_t left[LEVELS]; /* numbers whose symbol is in no level up to this */
} Head;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of `count` numbers beside their symbols. */
static int64_t rest_bytes(int kind, int64_t count) {
    int64_t halves = (count + 1) / 2;
    return kind == FLOAT8 ? halves : kind == FLOAT16 ? count + halves : count * (WIDTHS[kind] - 1);
}

/* Each number is turned left by a bit, so that its sign is below its exponent, and its symbol is
 * the upper half of a byte, the upper half of the higher byte (of float16, which has 5 bits there:
 * the symbol is 4 of them) or the highest byte. Lower halves are put together: byte j has those of
 * numbers j and n + j, where there are n bytes. */
static void split(int kind, const uint8_t *restrict numbers, int64_t count,
                  uint8_t *restrict symbols, uint8_t *restrict rest) {
    uint8_t halves[RUN + PAD];
    halves[count] = 0;
    if (kind == FLOAT8) {
        for (int64_t i = 0; i < count; i++) {
            uint8_t turned = (uint8_t)(numbers[i] << 1 | numbers[i] >> 7);
            symbols[i] = turned >> 4;
            halves[i] = turned & 15;
        }
    } else if (kind == FLOAT32) {
        for (int64_t i = 0; i < count; i++) {
            uint32_t number;
            memcpy(&number, numbers + 4 * i, sizeof number);
            number = number << 1 | number >> 31;
            uint16_t low = (uint16_t)number;
            symbols[i] = (uint8_t)(number >> 24);
            memcpy(rest + 2 * i, &low, sizeof low);
            rest[2 * count + i] = (uint8_t)(number >> 16);
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            uint16_t number;
            memcpy(&number, numbers + 2 * i, sizeof number);
            number = (uint16_t)(number << 1 | number >> 15);
            symbols[i] = (uint8_t)(number >> 8);
            rest[i] = (uint8_t)number;
        }
        rest += count;
    }
    if (kind == FLOAT16)
        for (int64_t i = 0; i < count; i++) {
            halves[i] = symbols[i] & 15;
            symbols[i] >>= 4;
        }
    if (kind == FLOAT8 || kind == FLOAT16)
        for (int64_t n = (count + 1) / 2, i = 0; i < n; i++)
            rest[i] = (uint8_t)(halves[i] | halves[n + i] << 4);
}

/* Symbols of a half are put above the other half. */
static void add_halves(uint8_t *restrict symbols, const uint8_t *restrict halves, int64_t count) {
    int64_t n = (count + 1) / 2;
    for (int64_t i = 0; i < n; i++)
        symbols[i] = (uint8_t)(symbols[i] << 4 | (halves[i] & 15));
    for (int64_t i = n; i < count; i++)
        symbols[i] = (uint8_t)(symbols[i] << 4 | halves[i - n] >> 4);
}

static void merge(int kind, uint8_t *restrict symbols, const uint8_t *restrict rest, int64_t count,
                  uint8_t *restrict numbers) {
    if (kind == FLOAT8) {
        add_halves(symbols, rest, count);
        for (int64_t i = 0; i < count; i++)
            numbers[i] = (uint8_t)(symbols[i] >> 1 | symbols[i] << 7);
    } else if (kind == FLOAT32) {
        for (int64_t i = 0; i < count; i++) {
            uint16_t low;
            memcpy(&low, rest + 2 * i, sizeof low);
            uint32_t turned = (uint32_t)symbols[i] << 24 | (uint32_t)rest[2 * count + i] << 16 | low;
            uint32_t number = turned >> 1 | turned << 31;
            memcpy(numbers + 4 * i, &number, sizeof number);
        }
    } else {
        if (kind == FLOAT16)
            add_halves(symbols, rest + count, count);
        for (int64_t i = 0; i < count; i++) {
            uint16_t turned = (uint16_t)(symbols[i] << 8 | rest[i]);
            uint16_t number = (uint16_t)(turned >> 1 | turned << 15);
            memcpy(numbers + 2 * i, &number, sizeof number);
        }
    }
}

/* The most frequent symbols, and how many numbers have others. Returns the bytes that the run
 * takes beside the rest. */
static int64_t plan(const uint8_t *symbols, int64_t count, Head *head) {
    uint16_t even[256] = {0}, odd[256] = {0};
    for (int64_t i = 0; i + 1 < count; i += 2) {
        even[symbols[i]]++;
        odd[symbols[i + 1]]++;
    }
    if (count & 1)
        even[symbols[count - 1]]++;
    uint8_t found[256];
    uint16_t times[256];
    int num_found = 0;
    for (int each = 0; each < 256; each++) {
        uint16_t sum = (uint16_t)(even[each] + odd[each]);
        if (sum) {
            found[num_found] = (uint8_t)each;
            times[num_found++] = sum;
        }
    }
    memset(head, 0, sizeof *head);
    int64_t left = count, bytes = HEAD + (count + 3) / 4;
    for (int rank = 0; rank < SYMBOLS; rank++) {
        int best = 0;
        for (int i = 1; i < num_found; i++)
            best = times[i] > times[best] ? i : best;
        if (num_found) {
            head->symbols[rank] = found[best];
            left -= times[best];
            times[best] = 0;
        }
        if (rank % OTHER == OTHER - 1) {
            head->left[rank / OTHER] = (uint16_t)left;
            bytes += rank == SYMBOLS - 1 ? left : (left + 3) / 4;
        }
    }
    return bytes;
}

/* Byte j of `packed` has codes j, j + n, j + 2 n, j + 3 n, where there are n bytes: so they are
 * unpacked without turning any. */
static int64_t pack(uint8_t *restrict codes, int64_t count, uint8_t *restrict packed) {
    int64_t n = (count + 3) / 4;
    memset(codes + count, 0, 4);
    for (int64_t j = 0; j < n; j++)
        packed[j] = (uint8_t)(codes[j] | codes[n + j] << 2 | codes[2 * n + j] << 4 |
                              codes[3 * n + j] << 6);
    return n;
}

static int64_t unpack(const uint8_t *restrict packed, int64_t count, uint8_t *restrict codes) {
    int64_t n = (count + 3) / 4;
    for (int k = 0; k < 4; k++)
        for (int64_t j = 0; j < n; j++)
            codes[k * n + j] = packed[j] >> (2 * k) & 3;
    return n;
}

/* Returns the bytes that were written. `symbols` are used up. */
static int64_t encode_run(const Head *head, uint8_t *symbols, int64_t count, uint8_t *out) {
    uint8_t ranks[256], codes[RUN + PAD];
    memset(ranks, SYMBOLS, sizeof ranks);
    for (int rank = SYMBOLS - 1; rank >= 0; rank--) /* the first of those that are there twice */
        ranks[head->symbols[rank]] = (uint8_t)rank;
    memset(out, 0, HEAD);
    memcpy(out, head->symbols, SYMBOLS);
    memcpy(out + SYMBOLS, head->left, sizeof head->left);
    uint8_t *at = out + HEAD;
    for (int level = 0; level < LEVELS; level++) {
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            uint8_t symbol = symbols[i];
            int rank = ranks[symbol] - OTHER * level;
            codes[i] = (uint8_t)(rank < OTHER ? rank : OTHER);
            symbols[left] = symbol;
            left += rank >= OTHER;
        }
        at += pack(codes, count, at);
        count = left;
    }
    memcpy(at, symbols, (size_t)count);
    return at + count - out;
}

#if defined __SSSE3__ && !defined __AVX512VBMI2__
/* By a mask of 8 places: for each of them, how many of the mask are before it. */
static uint8_t befores[256][8];

__attribute__((constructor)) static void fill_befores(void) {
    for (int mask = 0; mask < 256; mask++)
        for (int place = 0; place < 8; place++)
            befores[mask][place] = (uint8_t)__builtin_popcount(mask & ((1 << place) - 1));
}

static __m128i two_halves(const uint8_t *low, const uint8_t *high) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)low),
                              _mm_loadl_epi64((const __m128i *)high));
}
#endif

/* Symbols of codes; those of OTHER come from `others`, in order. All have PAD bytes behind. */
static void look_up(const uint8_t *restrict codes, int64_t count, const uint8_t *restrict table,
                    const uint8_t *restrict others, uint8_t *restrict symbols) {
#ifdef __AVX512VBMI2__
    uint32_t three = (uint32_t)(table[0] | table[1] << 8 | table[2] << 16);
    __m512i first = _mm512_set1_epi32((int)three);
    for (int64_t i = 0; i < count; i += 64) {
        __m512i code = _mm512_loadu_si512(codes + i);
        __mmask64 is_other = _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(OTHER));
        __m512i found = _mm512_shuffle_epi8(first, code);
        found = _mm512_mask_expand_epi8(found, is_other, _mm512_loadu_si512(others));
        _mm512_storeu_si512(symbols + i, found);
        others += __builtin_popcountll(is_other);
    }
#elif defined __SSSE3__
    __m128i first = _mm_setr_epi8((char)table[0], (char)table[1], (char)table[2], 0, 0, 0, 0, 0, 0,
                                  0, 0, 0, 0, 0, 0, 0);
    for (int64_t i = 0; i < count; i += 16) {
        __m128i code = _mm_loadu_si128((const __m128i *)(codes + i));
        __m128i is_other = _mm_cmpeq_epi8(code, _mm_set1_epi8(OTHER));
        int mask = _mm_movemask_epi8(is_other), low = mask & 255, high = mask >> 8;
        const uint8_t *after = others + __builtin_popcount((unsigned)low);
        __m128i places = two_halves(befores[low], befores[high]);
        places = _mm_add_epi8(places, _mm_set_epi64x(0x0808080808080808, 0));
        __m128i other = _mm_shuffle_epi8(two_halves(others, after), places);
        __m128i found = _mm_or_si128(_mm_shuffle_epi8(first, code), _mm_and_si128(other, is_other));
        _mm_storeu_si128((__m128i *)(symbols + i), found);
        others = after + __builtin_popcount((unsigned)high);
    }
#else
    const uint8_t first[4] = {table[0], table[1], table[2], 0};
    for (int64_t i = 0; i < count; i++) {
        uint8_t is_other = codes[i] == OTHER;
        symbols[i] = (uint8_t)(first[codes[i]] | (*others & -is_other));
        others += is_other;
    }
#endif
}

/* Where the run ends; NULL: it cannot be one. */
static const uint8_t *decode_run(const uint8_t *coded, const uint8_t *end, int64_t count,
                                 uint8_t *symbols) {
    /* No level has more others than these have room for, whatever the codes are. */
    uint8_t codes[LEVELS][RUN + 2 * PAD], others[2 * RUN + 2 * PAD], more[2 * RUN + 2 * PAD];
    int64_t counts[LEVELS + 1] = {count};
    Head head;
    if (end - coded < HEAD)
        return NULL;
    memcpy(head.symbols, coded, SYMBOLS);
    memcpy(head.left, coded + SYMBOLS, sizeof head.left);
    coded += HEAD;
    for (int level = 0; level < LEVELS; level++) {
        counts[level + 1] = head.left[level];
        if (counts[level + 1] > counts[level] || end - coded < (counts[level] + 3) / 4)
            return NULL;
        memset(codes[level] + counts[level], 0, PAD + 4);
        coded += unpack(coded, counts[level], codes[level]);
        memset(codes[level] + counts[level], 0, PAD);
    }
    int64_t left = counts[LEVELS];
    if (end - coded < left)
        return NULL;
    memcpy(others, coded, (size_t)left);
    look_up(codes[2], counts[2], head.symbols + 2 * OTHER, others, more);
    look_up(codes[1], counts[1], head.symbols + OTHER, more, others);
    look_up(codes[0], counts[0], head.symbols, others, symbols);
    return coded + left;
}

static int64_t keep(const uint8_t *block, int64_t size, uint8_t *out) {
    memset(out, 0, HEADER);
    memcpy(out + HEADER, block, (size_t)size);
    return HEADER + size;
}

/* The kind of numbers with which some runs of the block take least; 0: not worth reading. */
static int likely_kind(const uint8_t *block, int64_t size) {
    uint8_t symbols[RUN + PAD], rest[RUN * 3];
    Head head;
    int best = 0;
    double best_share = 0.98;
    for (int kind = FLOAT8; kind < KINDS; kind++) {
        int width = WIDTHS[kind];
        int64_t numbers = size / width, taken = 0, looked_at = 0;
        if (size % width)
            continue;
        for (int64_t k = 0; k < SAMPLED; k++) {
            int64_t first = numbers * k / SAMPLED, count = least(RUN, numbers - first);
            split(kind, block + first * width, count, symbols, rest);
            taken += plan(symbols, count, &head) + rest_bytes(kind, count);
            looked_at += count * width;
        }
        double share = looked_at ? (double)taken / (double)looked_at : 1.0;
        if (share < best_share) {
            best_share = share;
            best = kind;
        }
    }
    return best;
}

int64_t kvr_encode_block(const uint8_t *block, int64_t size, uint8_t *out) {
    int kind = likely_kind(block, size), width = WIDTHS[kind];
    if (!kind)
        return keep(block, size, out);
    uint8_t symbols[RUN + PAD];
    Head head;
    int64_t numbers = size / width;
    uint8_t *rest = out + HEADER, *at = rest, *end = out + HEADER + size;
    for (int64_t first = 0; first < numbers; first += RUN)
        at += rest_bytes(kind, least(RUN, numbers - first));
    for (int64_t first = 0; first < numbers; first += RUN) {
        int64_t count = least(RUN, numbers - first);
        split(kind, block + first * width, count, symbols, rest);
        rest += rest_bytes(kind, count);
        if (plan(symbols, count, &head) > end - at)
            return keep(block, size, out);
        at += encode_run(&head, symbols, count, at);
    }
    memset(out, 0, HEADER);
    out[0] = (uint8_t)kind;
    return at - out;
}

int kvr_decode_block(const uint8_t *coded, int64_t room, uint8_t *block, int64_t size) {
    if (room < HEADER)
        return 0;
    int kind = coded[0];
    const uint8_t *rest = coded + HEADER, *at = rest, *end = coded + room;
    if (kind == 0) {
        if (end - rest < size)
            return 0;
        memcpy(block, rest, (size_t)size);
        return 1;
    }
    if (kind >= KINDS || size % WIDTHS[kind])
        return 0;
    int width = WIDTHS[kind];
    int64_t numbers = size / width;
    for (int64_t first = 0; first < numbers; first += RUN)
        at += rest_bytes(kind, least(RUN, numbers - first));
    if (at > end)
        return 0;
    uint8_t symbols[RUN + PAD];
    for (int64_t first = 0; first < numbers; first += RUN) {
        int64_t count = least(RUN, numbers - first);
        at = decode_run(at, end, count, symbols);
        if (!at)
            return 0;
        merge(kind, symbols, rest, count, block + first * width);
        rest += rest_bytes(kind, count);
    }
    return 1;
}
