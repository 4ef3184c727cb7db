/* What an opener of the file tier knows of an epoch's chunks: 64 bits of each key, as index.fingerprint
 * makes them. In C, so that the threads that have put or got chunks note them, and not the interpreter.
 *
 * The table is cut into small ones with a lock each: one that grows is copied within microseconds, and who
 * asks about a key waits no longer than that. It is a hint: where there is no memory, a mark is left out.
 */
#include "kvtier_native.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SHARD_BITS 8
#define FIRST_ROOM 64
#define FINGERPRINT_PRIME (UINT64_MAX - 58)
#define GOLDEN UINT64_C(0x9e3779b97f4a7c15)

struct shard {
    pthread_mutex_t lock;
    uint64_t *marks; /* 0: free. Each is at its home or in the run of used places behind it */
    size_t room, count;
};

struct index {
    struct shard shards[1 << SHARD_BITS];
};

/* (high << 64 | low) % FINGERPRINT_PRIME, which is 59 below 1 << 64. */
static uint64_t reduced(uint64_t high, uint64_t low)
{
    unsigned __int128 sum = low;
    for (int i = 0; i < 3; i++) {
        sum += (unsigned __int128)high * 59;
        high = (uint64_t)(sum >> 64);
        sum = (uint64_t)sum;
    }
    return (uint64_t)(sum >= FINGERPRINT_PRIME ? sum - FINGERPRINT_PRIME : sum);
}

/* 64 bits that stand for a key. */
uint64_t kvt_fingerprint(const uint8_t *key, size_t key_bytes)
{
    size_t hash_bytes = key_bytes > GROUP_BYTES ? key_bytes - GROUP_BYTES : 0;
    uint64_t value = 0, group = 0;
    for (size_t at = (hash_bytes + 7) / 8 * 8; at > 0; at -= 8) {
        size_t bytes = at <= hash_bytes ? 8 : 8 - (at - hash_bytes);
        value = reduced(value, get_number(key + at - 8, (int)bytes));
    }
    for (size_t i = hash_bytes; i < key_bytes; i++)
        group = group << 8 | key[i];
    return value ^ group * GOLDEN;
}

static uint64_t mixed(uint64_t mark) { return (mark ^ mark >> 32) * GOLDEN; }

static struct shard *shard_of(struct index *index, uint64_t mark)
{
    return &index->shards[mixed(mark) >> (64 - SHARD_BITS)];
}

static size_t home_of(const struct shard *shard, uint64_t mark)
{
    return (size_t)(mixed(mark) >> 16) & (shard->room - 1);
}

/* The place of a mark, or the free one where it would be. The shard has room. */
static size_t place_of(const struct shard *shard, uint64_t mark)
{
    size_t at = home_of(shard, mark);
    while (shard->marks[at] != 0 && shard->marks[at] != mark)
        at = (at + 1) & (shard->room - 1);
    return at;
}

static bool grow(struct shard *shard)
{
    struct shard wider = {.room = shard->room ? 2 * shard->room : FIRST_ROOM};
    wider.marks = calloc(wider.room, sizeof *wider.marks);
    if (wider.marks == NULL)
        return false;
    for (size_t i = 0; i < shard->room; i++)
        if (shard->marks[i] != 0)
            wider.marks[place_of(&wider, shard->marks[i])] = shard->marks[i];
    free(shard->marks);
    shard->marks = wider.marks;
    shard->room = wider.room;
    return true;
}

static void add(struct index *index, uint64_t mark)
{
    struct shard *shard = shard_of(index, mark = mark ? mark : 1);
    pthread_mutex_lock(&shard->lock);
    if (4 * (shard->count + 1) <= 3 * shard->room || grow(shard)) {
        size_t at = place_of(shard, mark);
        shard->count += shard->marks[at] == 0;
        shard->marks[at] = mark;
    }
    pthread_mutex_unlock(&shard->lock);
}

/* Free a mark's place, and move back those behind it that would not be found any more. */
static void take_out(struct shard *shard, uint64_t mark)
{
    size_t mask = shard->room - 1, hole = place_of(shard, mark);
    if (shard->marks[hole] == 0)
        return;
    shard->count--;
    for (size_t at = (hole + 1) & mask; shard->marks[at] != 0; at = (at + 1) & mask) {
        size_t home = home_of(shard, shard->marks[at]);
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            shard->marks[hole] = shard->marks[at];
            hole = at;
        }
    }
    shard->marks[hole] = 0;
}

static void discard(struct index *index, uint64_t mark)
{
    struct shard *shard = shard_of(index, mark = mark ? mark : 1);
    pthread_mutex_lock(&shard->lock);
    if (shard->room)
        take_out(shard, mark);
    pthread_mutex_unlock(&shard->lock);
}

static bool is_there(struct index *index, uint64_t mark)
{
    struct shard *shard = shard_of(index, mark = mark ? mark : 1);
    pthread_mutex_lock(&shard->lock);
    bool found = shard->room && shard->marks[place_of(shard, mark)] == mark;
    pthread_mutex_unlock(&shard->lock);
    return found;
}

/* NULL where there is no memory. */
struct index *kvt_index_open(void)
{
    struct index *index = calloc(1, sizeof *index);
    for (size_t i = 0; index != NULL && i < 1 << SHARD_BITS; i++)
        pthread_mutex_init(&index->shards[i].lock, NULL);
    return index;
}

void kvt_index_close(struct index *index)
{
    for (size_t i = 0; i < 1 << SHARD_BITS; i++) {
        pthread_mutex_destroy(&index->shards[i].lock);
        free(index->shards[i].marks);
    }
    free(index);
}

uint64_t kvt_index_count(struct index *index)
{
    uint64_t count = 0;
    for (size_t i = 0; i < 1 << SHARD_BITS; i++) {
        pthread_mutex_lock(&index->shards[i].lock);
        count += index->shards[i].count;
        pthread_mutex_unlock(&index->shards[i].lock);
    }
    return count;
}

/* Note fingerprints as kvt_chunks_list gives them. */
void kvt_index_add_marks(struct index *index, const uint64_t *marks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        add(index, marks[i]);
}

/* Note that the chunks with these keys are there, or are not. Keys as in struct call; so below. */
void kvt_index_set(struct index *index, const uint8_t *keys, const uint32_t *key_ends, size_t count, int there)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t mark = kvt_fingerprint(keys + key_ends[i], key_ends[i + 1] - key_ends[i]);
        (there ? add : discard)(index, mark);
    }
}

/* Say for each key whether it is known: 1 or 0. */
void kvt_index_known(struct index *index, const uint8_t *keys, const uint32_t *key_ends, size_t count, uint8_t *known)
{
    for (size_t i = 0; i < count; i++)
        known[i] = is_there(index, kvt_fingerprint(keys + key_ends[i], key_ends[i + 1] - key_ends[i]));
}

/* Note the chunks of a call that were found or put. What was found to be gone, Python notes: it is seldom. */
void kvt_index_learn(struct index *index, const struct call *call, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        if (call->results[i] == RESULT_OK || call->results[i] == RESULT_EXISTS)
            kvt_index_set(index, call->keys, call->key_ends + i, 1, true);
}
