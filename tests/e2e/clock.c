/* For LD_PRELOAD: to the time of day are added the seconds in $CLOCK_OFFSET_FILE, an int64_t.
 *
 * Deadlines by the time of day are moved back by them, since the kernel compares with its own
 * clock. Ray's processes, told by their command lines, see the true time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const int64_t none;
static const volatile int64_t *offset = &none;

__attribute__((constructor)) static void begin(void) {
    static const char ray[] = "-packages/ray/";
    char line[1 << 16];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = read(file, line, sizeof line);
    close(file);
    const char *path = getenv("CLOCK_OFFSET_FILE");
    if (!path || size < 0 || memmem(line, (size_t)size, ray, sizeof ray - 1)) return;
    file = open(path, O_RDONLY | O_CLOEXEC);
    void *at = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) abort();
    offset = at;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) next;
    if (!next) next = NEXT(clock_gettime);
    int failed = next(clock, now);
    int is_time_of_day = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (!failed && is_time_of_day) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec t;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec, now->tv_usec = t.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME_COARSE, &t);
    if (now) *now = t.tv_sec;
    return t.tv_sec;
}

/* The kernel's time at that deadline. */
static struct timespec true_time(const struct timespec *deadline) {
    return (struct timespec){deadline->tv_sec - *offset, deadline->tv_nsec};
}

/* The clock is the condition's own. By a monotonic one nothing ends so late. */
int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m,
                           const struct timespec *restrict deadline) {
    int is_time_of_day = deadline->tv_sec > 1000000000;
    struct timespec at = is_time_of_day ? true_time(deadline) : *deadline;
    return pthread_cond_clockwait(c, m, is_time_of_day ? CLOCK_REALTIME : CLOCK_MONOTONIC, &at);
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict deadline) {
    struct timespec at = true_time(deadline);
    return sem_clockwait(s, CLOCK_REALTIME, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict deadline) {
    struct timespec at = true_time(deadline);
    return pthread_mutex_clocklock(m, CLOCK_REALTIME, &at);
}

/* Ray's locks wait by futexes. */
long syscall(long number, ...) {
    static __typeof__(&syscall) next;
    if (!next) next = NEXT(syscall);
    long a[6];
    struct timespec at;
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && a[1] & FUTEX_CLOCK_REALTIME && a[3]) {
        at = true_time((const struct timespec *)a[3]);
        a[3] = (long)&at;
    }
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
