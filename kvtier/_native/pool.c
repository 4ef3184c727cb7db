/* Threads that share out the chunks of calls among themselves.
 *
 * Python's threads would each need the interpreter lock before and after their part, and beside an engine
 * that computes each such time costs up to a switch interval. So Python submits a whole batch, and is woken
 * through a descriptor that its event loop watches: once for all batches that have ended until it looks.
 */
#include "kvtier_native.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

typedef int64_t (*work_on)(const struct call *, size_t first, size_t end);

struct task {
    work_on work;
    const struct call *call;
    size_t next, end, part; /* chunks not begun yet, and how many are taken at once */
    size_t running;
    int64_t sum;
    uint64_t token;
    struct task *following;
};

struct queue {
    struct task *first, **last;
};

struct kind { /* of threads: they wait here */
    pthread_cond_t changed;
    size_t waiting, woken; /* that nobody has woken yet; that were woken and do not run yet */
};

struct pool {
    pthread_mutex_t lock;
    struct kind of_readers, of_writers;
    struct queue reads, writes; /* tasks with chunks not begun, in the order in which they came */
    struct queue ended;         /* tasks to be told of through the descriptor */
    bool closing;
    int event_fd;
    size_t idle_readers, writing; /* threads: readers with nothing to do; all that are at a write */
    size_t readers, writers, count, started;
    pthread_t threads[];
};

static void add(struct queue *queue, struct task *task, bool is_first)
{
    struct task **place = is_first ? &queue->first : queue->last;
    task->following = *place;
    *place = task;
    if (task->following == NULL)
        queue->last = &task->following;
}

static void remove_first(struct queue *queue)
{
    if ((queue->first = queue->first->following) == NULL)
        queue->last = &queue->first;
}

/* Queue a task that has ended, and make the descriptor readable where it is not yet. The lock is given away for
 * the write, because the event loop may want it, and it has the interpreter's. */
static void complete(struct pool *pool, struct task *task)
{
    bool is_first = pool->ended.first == NULL;
    add(&pool->ended, task, false);
    if (!is_first)
        return;
    uint64_t one = 1;
    pthread_mutex_unlock(&pool->lock);
    while (write(pool->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_mutex_lock(&pool->lock);
}

/* Choose one thread that was not woken yet, to be woken. NULL where there is none. */
static pthread_cond_t *next_of(struct kind *kind)
{
    if (kind->waiting == 0)
        return NULL;
    kind->waiting--;
    kind->woken++;
    return &kind->changed;
}

/* Choose a thread for what nobody has begun: one of its kind first, then another. Who is at work looks anyway. */
static pthread_cond_t *next_to_wake(struct pool *pool)
{
    bool reading = pool->reads.first != NULL;
    if (!reading && pool->writes.first == NULL)
        return NULL;
    pthread_cond_t *found = next_of(reading ? &pool->of_readers : &pool->of_writers);
    return found != NULL ? found : next_of(reading ? &pool->of_writers : &pool->of_readers);
}

static int64_t work_on_part(struct task *task, size_t first, size_t end)
{
    int64_t result = task->work(task->call, first, end);
    if (task->call != NULL && task->call->index != NULL)
        kvt_index_learn(task->call->index, task->call, first, end);
    return result;
}

/* Take a part of the queue's first task, and do it without the lock. Who begins wakes the next one, so that
 * who hands in, the event loop, pays for one. */
static void do_part(struct pool *pool, struct queue *queue)
{
    struct task *task = queue->first;
    size_t first = task->next;
    size_t end = task->end - first < task->part ? task->end : first + task->part;
    task->next = end;
    task->running++;
    if (end == task->end)
        remove_first(queue);
    pool->writing += queue == &pool->writes;
    pthread_cond_t *next = next_to_wake(pool);
    pthread_mutex_unlock(&pool->lock);
    if (next != NULL)
        pthread_cond_signal(next);
    int64_t result = work_on_part(task, first, end);
    pthread_mutex_lock(&pool->lock);
    pool->writing -= queue == &pool->writes;
    task->sum += result;
    if (--task->running == 0 && task->next == task->end)
        complete(pool, task);
}

/* Which queue a thread serves now. Reads go before writes; but one thread writes on, so that puts end, and
 * one reader takes no write, so that a get begins at once. */
static struct queue *choose(struct pool *pool, bool reader)
{
    bool read = pool->reads.first != NULL, write = pool->writes.first != NULL;
    if (read && (reader || !write || pool->writing > 0))
        return &pool->reads;
    if (write && (!reader || pool->idle_readers > 1 || pool->closing))
        return &pool->writes;
    return NULL;
}

static void wait_for_work(struct pool *pool, struct kind *kind)
{
    kind->waiting++;
    while (kind->woken == 0 && !pool->closing)
        pthread_cond_wait(&kind->changed, &pool->lock);
    if (kind->woken > 0)
        kind->woken--;
    else
        kind->waiting--;
}

/* A thread that is woken mostly takes the processor from the one that woke it: from the event loop, while it
 * holds the interpreter lock, which an engine that computes waits for. Threads of this policy do not. */
static void use_batch_scheduling(void)
{
#ifdef SCHED_BATCH
    const struct sched_param none = {0};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
#endif
}

static void *serve(void *argument)
{
    struct pool *pool = argument;
    use_batch_scheduling();
    pthread_mutex_lock(&pool->lock);
    bool reader = pool->started++ < pool->readers;
    pool->idle_readers += reader;
    for (;;) {
        struct queue *queue = choose(pool, reader);
        if (queue != NULL) {
            pool->idle_readers -= reader;
            do_part(pool, queue);
            pool->idle_readers += reader;
        } else if (pool->closing && pool->reads.first == NULL && pool->writes.first == NULL) {
            break;
        } else {
            wait_for_work(pool, reader ? &pool->of_readers : &pool->of_writers);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void free_pool(struct pool *pool)
{
    if (pool->event_fd >= 0)
        close(pool->event_fd);
    pthread_cond_destroy(&pool->of_readers.changed);
    pthread_cond_destroy(&pool->of_writers.changed);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* End a pool that nobody uses any more, and wait for its threads. */
void kvt_pool_close(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->of_readers.changed);
    pthread_cond_broadcast(&pool->of_writers.changed);
    pthread_mutex_unlock(&pool->lock);
    for (size_t i = 0; i < pool->count; i++)
        pthread_join(pool->threads[i], NULL);
    while (pool->ended.first != NULL) {
        struct task *task = pool->ended.first;
        remove_first(&pool->ended);
        free(task);
    }
    free_pool(pool);
}

/* Start a pool. NULL where not all of its threads can be had. */
struct pool *kvt_pool_open(size_t readers, size_t writers)
{
    struct pool *pool = calloc(1, sizeof *pool + (readers + writers) * sizeof pool->threads[0]);
    if (pool == NULL)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->of_readers.changed, NULL);
    pthread_cond_init(&pool->of_writers.changed, NULL);
    pool->reads.last = &pool->reads.first;
    pool->writes.last = &pool->writes.first;
    pool->ended.last = &pool->ended.first;
    pool->readers = readers;
    pool->writers = writers;
    pool->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    sigset_t all, before; /* signals are for the interpreter's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->event_fd >= 0 && pool->count < readers + writers &&
           pthread_create(&pool->threads[pool->count], NULL, serve, pool) == 0)
        pool->count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->count == readers + writers)
        return pool;
    kvt_pool_close(pool);
    return NULL;
}

/* The descriptor that is readable when a task that was submitted has ended. */
int kvt_pool_fd(const struct pool *pool) { return pool->event_fd; }

/* Have the pool's threads do the first `end` chunks of a call, at least one, `part` of them at a time: without
 * waiting. `reading`: 0 a write, 1 a read, 2 a read that goes before the others. kvt_pool_ended tells of the end
 * by the token; the call stays until then. Returns 0 or ENOMEM. */
int kvt_pool_submit(struct pool *pool, work_on work, const struct call *call, size_t end, size_t part, int reading,
                    uint64_t token)
{
    struct task *task = calloc(1, sizeof *task);
    if (task == NULL)
        return ENOMEM;
    *task = (struct task){.work = work, .call = call, .end = end, .part = part, .token = token};
    pthread_mutex_lock(&pool->lock);
    add(reading ? &pool->reads : &pool->writes, task, reading == 2);
    pthread_cond_t *next = next_to_wake(pool);
    pthread_mutex_unlock(&pool->lock);
    if (next != NULL)
        pthread_cond_signal(next);
    return 0;
}

/* Take what has ended: tokens and sums, up to `room`. Returns how many; fewer than `room` were all. */
size_t kvt_pool_ended(struct pool *pool, uint64_t *tokens, int64_t *sums, size_t room)
{
    uint64_t told;
    size_t count = 0;
    pthread_mutex_lock(&pool->lock);
    if (read(pool->event_fd, &told, sizeof told) < 0)
        told = 0; /* nothing was told of: it is looked at all the same */
    while (count < room && pool->ended.first != NULL) {
        struct task *task = pool->ended.first;
        tokens[count] = task->token;
        sums[count++] = task->sum;
        remove_first(&pool->ended);
        free(task);
    }
    pthread_mutex_unlock(&pool->lock);
    return count;
}
