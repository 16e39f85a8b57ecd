/* A prefix sum that the compiler does not vectorise by itself, four rows at a time.

   Returns how many rows it did: a multiple of 4, and 0 without SSE2 (which every x86-64 has). The caller's plain loop
   does the rest. */
#ifndef ATTNCORE_PREFIX_SUM_H
#define ATTNCORE_PREFIX_SUM_H

#include <stdint.h>
#if defined(__SSE2__)
  #include <emmintrin.h>
#endif

/* sums[i + 1] is the sum of values[0..i] + 1; total is the last. */
static inline int32_t attncore_prefix_sum(const int32_t *values, int32_t *sums, int32_t count, int32_t *total) {
    int32_t i = 0;
#if defined(__SSE2__)
    __m128i carry = _mm_setzero_si128();
    for (; i + 4 <= count; i += 4) {
        __m128i four = _mm_loadu_si128((const __m128i *)(values + i));
        four = _mm_add_epi32(four, _mm_set1_epi32(1));
        four = _mm_add_epi32(four, _mm_slli_si128(four, 4));
        four = _mm_add_epi32(four, _mm_slli_si128(four, 8));
        four = _mm_add_epi32(four, carry);
        _mm_storeu_si128((__m128i *)(sums + i + 1), four);
        carry = _mm_shuffle_epi32(four, 0xFF);
    }
    *total = _mm_cvtsi128_si32(carry);
#endif
    return i;
}

#endif
