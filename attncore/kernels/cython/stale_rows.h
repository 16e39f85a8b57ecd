/* Finds the rows whose next token is not in their cached block, sixteen rows at a time.

   Returns how many rows it looked at: a multiple of 16, and 0 without SSE2 (which every x86-64 has). The caller's plain
   loop does the rest. */
#ifndef ATTNCORE_STALE_ROWS_H
#define ATTNCORE_STALE_ROWS_H

#include <stdint.h>
#if defined(__SSE2__)
  #include <emmintrin.h>
#endif

#if defined(__SSE2__)
/* All ones in lanes whose token is in its cached column. shift < 0: no power of two, and no division either. */
static inline __m128i attncore_in_column(const int32_t *computed, const int32_t *column, int shift,
                                         __m128i tokens) {
    __m128i token = _mm_loadu_si128((const __m128i *)computed), cached = _mm_loadu_si128((const __m128i *)column);
    __m128i even, odd, offset;
    if (shift >= 0) return _mm_cmpeq_epi32(_mm_sra_epi32(token, _mm_cvtsi32_si128(shift)), cached);
    even = _mm_mul_epu32(cached, tokens);
    odd = _mm_mul_epu32(_mm_srli_epi64(cached, 32), tokens);
    offset = _mm_sub_epi32(token, _mm_unpacklo_epi32(_mm_shuffle_epi32(even, 8), _mm_shuffle_epi32(odd, 8)));
    /* 0 <= offset < tokens: neither offset nor tokens - 1 - offset is negative. */
    tokens = _mm_sub_epi32(_mm_sub_epi32(tokens, _mm_set1_epi32(1)), offset);
    return _mm_cmpgt_epi32(_mm_or_si128(offset, tokens), _mm_set1_epi32(-1));
}
static const int32_t attncore_lanes[16][4] = {
    {0}, {0}, {1}, {0, 1}, {2}, {0, 2}, {1, 2}, {0, 1, 2}, {3}, {0, 3}, {1, 3}, {0, 1, 3}, {2, 3}, {0, 2, 3},
    {1, 2, 3}, {0, 1, 2, 3}};
static const int32_t attncore_num_lanes[16] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
#endif
/* Rows whose token is not in their cached column, into stale (room for count); num_stale is how many. */
static inline int32_t attncore_stale_rows(const int32_t *computed, const int32_t *column, int32_t count, int shift,
                                           int32_t block, int32_t *stale, int32_t *num_stale) {
    int32_t i = 0;
#if defined(__SSE2__)
    const __m128i tokens = _mm_set1_epi32(block);
    int32_t k, n = 0, lanes;
    __m128i fresh[4];
    for (; i + 16 <= count; i += 16) {
        for (k = 0; k < 4; k++)
            fresh[k] = attncore_in_column(computed + i + 4 * k, column + i + 4 * k, shift, tokens);
        if (_mm_movemask_epi8(_mm_and_si128(_mm_and_si128(fresh[0], fresh[1]), _mm_and_si128(fresh[2], fresh[3])))
            == 0xFFFF) continue;
        for (k = 0; k < 4; k++) {  /* without a branch: which rows begin a block cannot be predicted */
            lanes = ~_mm_movemask_ps(_mm_castsi128_ps(fresh[k])) & 15;
            _mm_storeu_si128((__m128i *)(stale + n),
                             _mm_add_epi32(_mm_set1_epi32(i + 4 * k),
                                           _mm_loadu_si128((const __m128i *)attncore_lanes[lanes])));
            n += attncore_num_lanes[lanes];
        }
    }
    *num_stale = n;
#endif
    return i;
}

#endif
