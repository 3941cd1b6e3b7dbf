/* Threads that take runs of work until there are no more. The caller takes some, too, and waits only for those who began. */
#define _GNU_SOURCE
#include "shared.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { MOST_THREADS = 256 };
enum { SPINS_TO_YIELD = 1000 };

static struct {
    pthread_mutex_t calling, sleeping;
    pthread_cond_t wake;
    int count, sleepers;
    Work work;
    const void *job;
    int64_t end, chunk;
    _Atomic int64_t next;
    _Atomic int wanted, inside, is_open;
    _Atomic unsigned number;
} pool = {
    .calling = PTHREAD_MUTEX_INITIALIZER, .sleeping = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
};

static void take(void) {
    for (;;) {
        const int64_t begin = atomic_fetch_add(&pool.next, pool.chunk);
        if (begin >= pool.end) return;
        pool.work(pool.job, begin, begin + pool.chunk < pool.end ? begin + pool.chunk : pool.end);
    }
}

static void *serve(void *argument) {
    const int own = (int)(intptr_t)argument;
    const uint64_t patience = ticks_of_40_us(); /* a thread looks for work so long, then sleeps */
    for (unsigned seen = 0;;) {
        const uint64_t began = ticks();
        while (atomic_load(&pool.number) == seen && ticks() - began < patience) relax();
        if (atomic_load(&pool.number) == seen) {
            pthread_mutex_lock(&pool.sleeping);
            pool.sleepers++;
            while (atomic_load(&pool.number) == seen) pthread_cond_wait(&pool.wake, &pool.sleeping);
            pool.sleepers--;
            pthread_mutex_unlock(&pool.sleeping);
        }
        seen = atomic_load(&pool.number);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.is_open) && own < atomic_load(&pool.wanted)) take();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* A forked process has no such threads. */
static void forget(void) {
    pthread_mutex_init(&pool.calling, NULL);
    pthread_mutex_init(&pool.sleeping, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.count = pool.sleepers = 0;
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.is_open, 0);
}

static __attribute__((constructor)) void prepare(void) { pthread_atfork(NULL, NULL, forget); }

void baton_in_parallel(Work work, const void *job, int64_t end, int64_t chunk, int64_t most) {
    const int threads = most < MOST_THREADS ? (int)most : MOST_THREADS;
    if (threads < 2 || end <= chunk || pthread_mutex_trylock(&pool.calling)) {
        work(job, 0, end);
        return;
    }
    for (pthread_t thread; pool.count < threads - 1; pool.count++) {
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)pool.count)) break;
        pthread_detach(thread);
    }
    pool.work = work, pool.job = job, pool.end = end, pool.chunk = chunk;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.wanted, threads - 1);
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.number, 1);
    pthread_mutex_lock(&pool.sleeping);
    if (pool.sleepers) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleeping);
    take();
    atomic_store(&pool.is_open, 0);
    for (int spins = 0; atomic_load(&pool.inside); spins++) spins < SPINS_TO_YIELD ? relax() : (void)sched_yield();
    pthread_mutex_unlock(&pool.calling);
}
