/* Several processes with several threads each over one root: puts, gets, look-ups, discards, scans and lists at once,
 * in the native library's pool and past it. Built with sanitizers by `nox -s native`; ends with 0 where every byte that
 * was got is right and no call has failed.
 *
 *     stress <root> <seconds> <processes>
 */
#include "kvtier_native.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct pool;
typedef int64_t (*work_on)(const struct call *, size_t, size_t);
struct pool *kvt_pool_open(size_t readers, size_t writers);
void kvt_pool_close(struct pool *pool);
int kvt_pool_fd(const struct pool *pool);
int kvt_pool_submit(struct pool *pool, work_on work, const struct call *call, size_t end, size_t part, int reading,
                    uint64_t token);
size_t kvt_pool_ended(struct pool *pool, uint64_t *tokens, int64_t *sums, size_t room);
int64_t kvt_files_put(const struct call *call, size_t first, size_t end);
int64_t kvt_files_get(const struct call *call, size_t first, size_t end);
int64_t kvt_files_contains(const struct call *call, size_t first, size_t end);
int64_t kvt_files_discard(const struct call *call, size_t first, size_t end);
void kvt_files_touch(const struct call *call, size_t first, size_t end);
int64_t kvt_tree_bytes(int root_fd, const char *path, const uint32_t *stop, int64_t sums[3]);
int64_t kvt_chunks_list(int root_fd, const char *folder, const uint32_t *stop, uint64_t *out, uint64_t room);
struct index *kvt_index_open(void);
void kvt_index_close(struct index *index);
void kvt_index_known(struct index *index, const uint8_t *keys, const uint32_t *key_ends, size_t count, uint8_t *known);
void kvt_index_set(struct index *index, const uint8_t *keys, const uint32_t *key_ends, size_t count, int there);
uint64_t kvt_index_count(struct index *index);

enum { BATCH = 8, CHUNK = 8192, CHUNKS = 64, KEY = 36, DRIVERS = 3 };

static int root_fd;
static char tmp_dir[64];
static time_t end_at;
static struct index *known;
static uint64_t serial;

struct batch { /* one call and all that it points to */
    struct call call;
    uint8_t keys[BATCH * KEY], *slots;
    uint32_t key_ends[BATCH + 1], stop;
    int64_t places[BATCH];
    int32_t results[BATCH];
    uint64_t inodes[BATCH];
    int numbers[BATCH];
};

static void fail(const char *what, int number, int result)
{
    fprintf(stderr, "%s of chunk %d: %d\n", what, number, result);
    abort();
}

/* Choose other chunks for a batch. Chunk n has the hash n, n + 1, ... and is full of n. */
static void choose(struct batch *batch, unsigned *seed)
{
    for (int i = 0; i < BATCH; i++) {
        batch->numbers[i] = (int)(rand_r(seed) % (CHUNKS / BATCH)) * BATCH + i; /* none is twice in a batch */
        for (int k = 0; k < KEY - GROUP_BYTES; k++)
            batch->keys[i * KEY + k] = (uint8_t)(batch->numbers[i] * 7 + k);
    }
    batch->call.serial = __atomic_fetch_add(&serial, BATCH, __ATOMIC_RELAXED);
    batch->stop = rand_r(seed) % 16 == 0;
}

static struct batch *make_batch(void)
{
    struct batch *batch = calloc(1, sizeof *batch);
    if (posix_memalign((void **)&batch->slots, BLOCK_BYTES, BATCH * CHUNK))
        abort();
    for (int i = 0; i <= BATCH; i++)
        batch->key_ends[i] = (uint32_t)(i * KEY);
    for (int i = 0; i < BATCH; i++)
        batch->places[i] = i;
    batch->call = (struct call){.data_dir = "data", .tmp_dir = tmp_dir, .keys = batch->keys,
                                .key_ends = batch->key_ends, .slots = batch->places, .stop = &batch->stop,
                                .results = batch->results, .inodes = batch->inodes,
                                .base = (uint64_t)(uintptr_t)batch->slots, .chunk_bytes = CHUNK, .root_fd = root_fd,
                                .index = known};
    return batch;
}

static void fill(struct batch *batch)
{
    for (int i = 0; i < BATCH; i++)
        memset(batch->slots + i * CHUNK, batch->numbers[i], CHUNK);
}

static void check(const struct batch *batch, bool reading)
{
    for (int i = 0; i < BATCH; i++) {
        int result = batch->results[i];
        if (result != RESULT_OK && result != (reading ? RESULT_ABSENT : RESULT_EXISTS) && result != -ECANCELED)
            fail(reading ? "get" : "put", batch->numbers[i], result);
        for (int k = 0; reading && result == RESULT_OK && k < CHUNK; k++)
            if (batch->slots[i * CHUNK + k] != (uint8_t)batch->numbers[i])
                fail("byte", batch->numbers[i], batch->slots[i * CHUNK + k]);
    }
}

/* What the tier's other threads do, past the pool. */
static void *maintain(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    struct batch *batch = make_batch();
    uint64_t marks[CHUNKS];
    uint8_t found[BATCH];
    int64_t sums[3] = {0};
    for (; time(NULL) < end_at; choose(batch, &seed)) {
        kvt_index_known(known, batch->keys, batch->key_ends, BATCH, found);
        kvt_files_contains(&batch->call, 0, BATCH);
        kvt_files_touch(&batch->call, 0, BATCH);
        if (rand_r(&seed) % 4 == 0) {
            kvt_files_discard(&batch->call, 0, BATCH);
            kvt_index_set(known, batch->keys, batch->key_ends, BATCH, false);
        }
        kvt_tree_bytes(root_fd, ".", &batch->stop, sums);
        kvt_chunks_list(root_fd, "data/070", &batch->stop, marks, CHUNKS);
        kvt_index_count(known);
    }
    free(batch->slots);
    free(batch);
    return NULL;
}

/* What the event loop does: submit batches, and look at those that have ended. */
static void drive(struct pool *pool, unsigned seed)
{
    struct batch *batches[DRIVERS];
    bool reading[DRIVERS], busy[DRIVERS] = {false};
    size_t under_way = 0;
    for (int i = 0; i < DRIVERS; i++)
        batches[i] = make_batch();
    while (time(NULL) < end_at || under_way > 0) {
        for (int i = 0; i < DRIVERS && time(NULL) < end_at; i++) {
            if (busy[i])
                continue;
            choose(batches[i], &seed);
            reading[i] = rand_r(&seed) % 2;
            if (!reading[i])
                fill(batches[i]);
            if (kvt_pool_submit(pool, reading[i] ? kvt_files_get : kvt_files_put, &batches[i]->call, BATCH, 2, reading[i],
                                (uint64_t)i))
                abort();
            busy[i] = true;
            under_way++;
        }
        struct pollfd watched = {kvt_pool_fd(pool), POLLIN, 0};
        uint64_t tokens[DRIVERS];
        int64_t sums[DRIVERS];
        if (poll(&watched, 1, 5000) != 1)
            fail("end", -1, 0);
        for (size_t count = kvt_pool_ended(pool, tokens, sums, DRIVERS); count > 0; count--, under_way--) {
            check(batches[tokens[count - 1]], reading[tokens[count - 1]]);
            busy[tokens[count - 1]] = false;
        }
    }
    for (int i = 0; i < DRIVERS; i++) {
        free(batches[i]->slots);
        free(batches[i]);
    }
}

static int be_an_engine(unsigned seed)
{
    snprintf(tmp_dir, sizeof tmp_dir, "tmp%d", getpid());
    known = kvt_index_open();
    struct pool *pool = kvt_pool_open(3, 3);
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, maintain, (void *)(seed + 77 + i));
    drive(pool, seed);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    kvt_pool_close(pool);
    kvt_index_close(known);
    return 0;
}

int main(int count, char **arguments)
{
    if (count != 4 || (root_fd = open(arguments[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
        return 2;
    end_at = time(NULL) + atoi(arguments[2]);
    int processes = atoi(arguments[3]), failed = 0, status;
    for (int i = 0; i < processes; i++)
        if (fork() == 0)
            exit(be_an_engine((unsigned)(i * 1000 + 1)));
    while (wait(&status) > 0)
        failed |= !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    return failed;
}
