/* Threads that help the caller; see thread_pool.c. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* body(arg, i) for every i in [0, tasks), by the caller and up to threads - 1 helpers. */
void kvr_parallel(int threads, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg);

/* A thread's number among those that may take part in a job: below `threads`, 0 of the caller. */
int kvr_thread_index(void);

/* body(arg, i, next) for every i in [0, count). Each thread takes those of a part of its own from the
 * first to the last, then what is left of others' parts from their end. `next`: what it will take
 * next, most likely; -1: nothing. */
void kvr_parallel_ranges(int threads, int64_t count, void (*body)(void *arg, int64_t i, int64_t next),
               void *arg);

/* At least `bytes` of memory of the calling thread, 64-byte aligned, valid until it asks again for the
 * same use. */
enum { SCRATCH_CALLER, SCRATCH_TASK, SCRATCH_EXPERTS, SCRATCH_LATENT, SCRATCH_CONVOLVED, SCRATCH_GATE,
       SCRATCH_LOW_RANK, SCRATCH_ADDED, SCRATCH_INDEX, SCRATCH_SELECTED, SCRATCH_PAGES, NUM_SCRATCH };
void *kvr_scratch(int use, size_t bytes);
