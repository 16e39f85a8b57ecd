/* Stores and loads a word that the device reads or writes: a store comes after, and a load before, every other access
   of its step. */
#ifndef ATTNCORE_DEVICE_WORD_H
#define ATTNCORE_DEVICE_WORD_H

#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
static inline void attncore_store(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline int64_t attncore_load(int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
#else
static inline void attncore_store(int64_t *word, int64_t value) { *(volatile int64_t *)word = value; }
static inline int64_t attncore_load(int64_t *word) { return *(volatile int64_t *)word; }
#endif

#endif
