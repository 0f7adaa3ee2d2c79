#include <errno.h>
#include <time.h>

#include "base/clock.h"
#include "io/io_internal.h"

/* Long enough that one reader at a time, who comes back for more only after each read, still gets the full rate. */
static const uint64_t burst_ns = 4000000;

void imp_io_limit_init(imp_io_limit *l, uint64_t bytes_per_s)
{
    l->bytes_per_s = bytes_per_s;
    l->burst_ns = burst_ns;
    atomic_init(&l->due_ns, 0);
    atomic_init(&l->bytes, 0);
}

uint64_t imp_io_limit_reserve(imp_io_limit *l, uint64_t now_ns, uint64_t n_bytes)
{
    if (l->bytes_per_s == 0) return 0;
    atomic_fetch_add_explicit(&l->bytes, n_bytes, memory_order_relaxed);
    double cost = (double)n_bytes * 1e9 / (double)l->bytes_per_s;
    uint64_t cost_ns = cost < 1e17 ? (uint64_t)cost : (uint64_t)1e17; /* three years: no overflow below */

    /* Relaxed: only the schedule itself must be consistent. */
    uint64_t due = atomic_load_explicit(&l->due_ns, memory_order_relaxed), end;
    do end = (due > now_ns ? due : now_ns) + cost_ns;
    while (!atomic_compare_exchange_weak_explicit(&l->due_ns, &due, end, memory_order_relaxed, memory_order_relaxed));
    return end > now_ns + l->burst_ns ? end - l->burst_ns : 0;
}

void imp_io_sleep_until(uint64_t when_ns)
{
    struct timespec t = {.tv_sec = (time_t)(when_ns / 1000000000u), .tv_nsec = (long)(when_ns % 1000000000u)};
    while (when_ns > imp_now_ns() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
}
