/* Threads that help the caller; see pool.c. */
#ifndef KVRELAY_POOL_H
#define KVRELAY_POOL_H

#include <stddef.h>
#include <stdint.h>

/* body(arg, i) for every i in [0, tasks), by the caller and up to threads - 1 helpers. */
void kvr_parallel(int threads, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg);

/* At least `bytes` of memory of the calling thread, 64-byte aligned, valid until it asks again. */
void *kvr_scratch(size_t bytes);

#endif
