/* Thread pools in which no thread waits for a helper that has not begun.
 *
 * Workers of a small deployment share cores with each other, the router and the API. A barrier that
 * every thread has to reach then costs a scheduler's time slice whenever one of them is not
 * running, hundreds of times a step. Here tasks are claimed one by one from a counter; the caller
 * claims too, and at the end it waits only for tasks that a helper has claimed and not finished.
 *
 * `ticket` is (generation << 32 | next task). It is CLOSED while the job's fields change, so a
 * claim (compare-and-swap on the ticket) succeeds only for the job whose fields were read. One job
 * runs at a time; a caller that finds the pool taken does its tasks alone.
 *
 * A thread that gives way to others (nicer than the process) has helpers apart, because helpers
 * inherit the niceness of who starts them and cannot lower it. */
#define _GNU_SOURCE
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_HELPERS 255
#define CLOSED UINT32_MAX
#define SPINS 2000 /* about 50 us: the gap between two kernels of a step */
#define SCRATCH_HEADER 64

typedef struct {
    pthread_mutex_t taken; /* held by the caller during its job */
    pthread_mutex_t sleep_mutex;
    pthread_cond_t wake;
    int num_helpers; /* changed under `taken` */
    atomic_int sleepers;
    _Atomic uint64_t ticket;
    _Atomic int64_t num_tasks, num_done;
    _Atomic int limit; /* helpers with a lower number may take part */
    void (*_Atomic job_body)(void *, int64_t);
    void *_Atomic job_arg;
} Pool;

typedef struct {
    Pool *pool;
    int number;
} Helper;

static Pool pools[2]; /* of threads that do not give way, and of those that do */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_keys[NUM_SCRATCH];
static _Thread_local int thread_index; /* 0 of callers, a helper's number + 1 */
static _Thread_local Pool *own_pool; /* of callers */

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Run one task of the job that is open; 0 if there is none for helper `number`. */
static int run_one(Pool *pool, int number) {
    uint64_t seen = atomic_load(&pool->ticket);
    int64_t task = (int64_t)(seen & UINT32_MAX);
    if (task == CLOSED || number >= atomic_load(&pool->limit) ||
        task >= atomic_load(&pool->num_tasks))
        return 0;
    void (*body)(void *, int64_t) = atomic_load(&pool->job_body);
    void *arg = atomic_load(&pool->job_arg);
    if (!atomic_compare_exchange_strong(&pool->ticket, &seen, seen + 1))
        return 1; /* look again */
    body(arg, task);
    atomic_fetch_add(&pool->num_done, 1);
    return 1;
}

static void sleep_until_changed(Pool *pool, uint64_t seen) {
    pthread_mutex_lock(&pool->sleep_mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->ticket) == seen) pthread_cond_wait(&pool->wake, &pool->sleep_mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->sleep_mutex);
}

static void *helper_main(void *arg) {
    Helper me = *(Helper *)arg;
    free(arg);
    thread_index = me.number + 1;
    for (;;) {
        uint64_t seen = atomic_load(&me.pool->ticket);
        if (run_one(me.pool, me.number)) continue;
        int spins = 0;
        while (atomic_load(&me.pool->ticket) == seen && spins++ < SPINS) relax();
        if (spins > SPINS) sleep_until_changed(me.pool, seen);
    }
    return NULL;
}

static void reset_pools(void) {
    for (int p = 0; p < 2; p++) {
        pools[p].num_helpers = 0;
        atomic_store(&pools[p].sleepers, 0);
        atomic_store(&pools[p].ticket, CLOSED);
        pthread_mutex_init(&pools[p].taken, NULL);
        pthread_mutex_init(&pools[p].sleep_mutex, NULL);
        pthread_cond_init(&pools[p].wake, NULL);
    }
}

static void start(void) {
    reset_pools();
    pthread_atfork(NULL, NULL, reset_pools); /* a forked child has none of the helpers */
    for (int use = 0; use < NUM_SCRATCH; use++) pthread_key_create(scratch_keys + use, free);
}

static Pool *pool_of_caller(void) {
    if (!own_pool) {
        pthread_once(&once, start);
        int own = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
        own_pool = pools + (own > getpriority(PRIO_PROCESS, (id_t)getpid()));
    }
    return own_pool;
}

static void grow(Pool *pool, int wanted) {
    wanted = wanted < MAX_HELPERS ? wanted : MAX_HELPERS;
    while (pool->num_helpers < wanted) {
        pthread_t thread;
        Helper *helper = malloc(sizeof *helper);
        if (!helper) return;
        *helper = (Helper){pool, pool->num_helpers};
        if (pthread_create(&thread, NULL, helper_main, helper)) {
            free(helper);
            return;
        }
        pthread_detach(thread);
        pool->num_helpers++;
    }
}

int kvr_thread_index(void) { return thread_index; }

void kvr_parallel(int threads, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg) {
    Pool *pool = threads > 1 && tasks > 1 && tasks < CLOSED ? pool_of_caller() : NULL;
    if (!pool || pthread_mutex_trylock(&pool->taken)) {
        for (int64_t task = 0; task < tasks; task++) body(arg, task);
        return;
    }
    grow(pool, threads - 1);
    uint64_t generation = (atomic_load(&pool->ticket) >> 32) + 1; /* the ticket is closed here */
    atomic_store(&pool->job_body, body);
    atomic_store(&pool->job_arg, arg);
    atomic_store(&pool->num_tasks, tasks);
    atomic_store(&pool->num_done, 0);
    atomic_store(&pool->limit, threads - 1);
    atomic_store(&pool->ticket, generation << 32);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->sleep_mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->sleep_mutex);
    }
    while (run_one(pool, -1)) {
    }
    for (int spins = 0; atomic_load(&pool->num_done) < tasks; spins++) {
        if (spins < SPINS)
            relax();
        else
            sched_yield(); /* the helper may be waiting for this very core */
    }
    atomic_store(&pool->ticket, generation << 32 | CLOSED);
    pthread_mutex_unlock(&pool->taken);
}

typedef struct {
    _Alignas(64) _Atomic uint64_t left; /* first << 32 | end */
} Part;

typedef struct {
    Part *parts;
    int num_parts;
    void (*body)(void *arg, int64_t i, int64_t next);
    void *arg;
} Share;

/* The first of a part, or the last; -1 if there is none. */
static int64_t take(Part *part, int from_end) {
    uint64_t left = atomic_load(&part->left), first, end;
    do {
        first = left >> 32, end = left & UINT32_MAX;
        if (first >= end) return -1;
    } while (!atomic_compare_exchange_weak(&part->left, &left,
                                           from_end ? left - 1 : left + (1ull << 32)));
    return (int64_t)(from_end ? end - 1 : first);
}

static int64_t end_of(const Part *part) {
    uint64_t left = atomic_load(&part->left);
    return left >> 32 < (left & UINT32_MAX) ? (int64_t)(left & UINT32_MAX) - 1 : -1;
}

static void share_task(void *arg, int64_t task) {
    (void)task; /* whichever it is, it goes on until nothing is left */
    const Share *s = arg;
    int own = thread_index % s->num_parts;
    for (int p = 0; p < s->num_parts; p++) {
        Part *part = s->parts + (own + p) % s->num_parts, *other = s->parts + (own + 1) % s->num_parts;
        for (int64_t i; (i = take(part, p > 0)) >= 0;) {
            int64_t next = i + 1;
            if (p > 0 || next >= (int64_t)(atomic_load(&part->left) & UINT32_MAX))
                next = end_of(p > 0 ? part : other);
            s->body(s->arg, i, next);
        }
    }
}

void kvr_parallel_ranges(int threads, int64_t count, void (*body)(void *arg, int64_t i, int64_t next),
               void *arg) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(arg, i, i + 1 < count ? i + 1 : -1);
        return;
    }
    Part parts[threads];
    for (int p = 0; p < threads; p++)
        parts[p].left = (uint64_t)(count * p / threads) << 32 | (uint64_t)(count * (p + 1) / threads);
    Share share = {parts, threads, body, arg};
    kvr_parallel(threads, threads, share_task, &share);
}

void *kvr_scratch(int use, size_t bytes) {
    pthread_once(&once, start);
    size_t *held = pthread_getspecific(scratch_keys[use]);
    if (!held || *held < bytes) {
        free(held);
        size_t whole = (bytes + SCRATCH_HEADER + 63) / 64 * 64;
        held = aligned_alloc(64, whole);
        if (!held) abort(); /* less than a step's activations: nothing works without it */
        *held = whole - SCRATCH_HEADER;
        pthread_setspecific(scratch_keys[use], held);
    }
    return (char *)held + SCRATCH_HEADER;
}
