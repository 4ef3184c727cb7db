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

#define SHELF_BITS 8
#define FIRST_ROOM 64
#define FINGERPRINT_PRIME (UINT64_MAX - 58)
#define GOLDEN UINT64_C(0x9e3779b97f4a7c15)

struct shelf {
    pthread_mutex_t lock;
    uint64_t *marks; /* 0: free. Each is at its home or in the run of used places behind it */
    size_t room, count;
};

struct index {
    struct shelf shelves[1 << SHELF_BITS];
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

static struct shelf *shelf_of(struct index *index, uint64_t mark)
{
    return &index->shelves[mixed(mark) >> (64 - SHELF_BITS)];
}

static size_t home_of(const struct shelf *shelf, uint64_t mark)
{
    return (size_t)(mixed(mark) >> 16) & (shelf->room - 1);
}

/* The place of a mark, or the free one where it would be. The shelf has room. */
static size_t place_of(const struct shelf *shelf, uint64_t mark)
{
    size_t at = home_of(shelf, mark);
    while (shelf->marks[at] != 0 && shelf->marks[at] != mark)
        at = (at + 1) & (shelf->room - 1);
    return at;
}

static bool grow(struct shelf *shelf)
{
    struct shelf wider = {.room = shelf->room ? 2 * shelf->room : FIRST_ROOM};
    wider.marks = calloc(wider.room, sizeof *wider.marks);
    if (wider.marks == NULL)
        return false;
    for (size_t i = 0; i < shelf->room; i++)
        if (shelf->marks[i] != 0)
            wider.marks[place_of(&wider, shelf->marks[i])] = shelf->marks[i];
    free(shelf->marks);
    shelf->marks = wider.marks;
    shelf->room = wider.room;
    return true;
}

static void add(struct index *index, uint64_t mark)
{
    struct shelf *shelf = shelf_of(index, mark = mark ? mark : 1);
    pthread_mutex_lock(&shelf->lock);
    if (4 * (shelf->count + 1) <= 3 * shelf->room || grow(shelf)) {
        size_t at = place_of(shelf, mark);
        shelf->count += shelf->marks[at] == 0;
        shelf->marks[at] = mark;
    }
    pthread_mutex_unlock(&shelf->lock);
}

/* Free a mark's place, and move back those behind it that would not be found any more. */
static void take_out(struct shelf *shelf, uint64_t mark)
{
    size_t mask = shelf->room - 1, hole = place_of(shelf, mark);
    if (shelf->marks[hole] == 0)
        return;
    shelf->count--;
    for (size_t at = (hole + 1) & mask; shelf->marks[at] != 0; at = (at + 1) & mask) {
        size_t home = home_of(shelf, shelf->marks[at]);
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            shelf->marks[hole] = shelf->marks[at];
            hole = at;
        }
    }
    shelf->marks[hole] = 0;
}

static void discard(struct index *index, uint64_t mark)
{
    struct shelf *shelf = shelf_of(index, mark = mark ? mark : 1);
    pthread_mutex_lock(&shelf->lock);
    if (shelf->room)
        take_out(shelf, mark);
    pthread_mutex_unlock(&shelf->lock);
}

static bool is_there(struct index *index, uint64_t mark)
{
    struct shelf *shelf = shelf_of(index, mark = mark ? mark : 1);
    pthread_mutex_lock(&shelf->lock);
    bool found = shelf->room && shelf->marks[place_of(shelf, mark)] == mark;
    pthread_mutex_unlock(&shelf->lock);
    return found;
}

/* NULL where there is no memory. */
struct index *kvt_index_open(void)
{
    struct index *index = calloc(1, sizeof *index);
    for (size_t i = 0; index != NULL && i < 1 << SHELF_BITS; i++)
        pthread_mutex_init(&index->shelves[i].lock, NULL);
    return index;
}

void kvt_index_close(struct index *index)
{
    for (size_t i = 0; i < 1 << SHELF_BITS; i++) {
        pthread_mutex_destroy(&index->shelves[i].lock);
        free(index->shelves[i].marks);
    }
    free(index);
}

uint64_t kvt_index_count(struct index *index)
{
    uint64_t count = 0;
    for (size_t i = 0; i < 1 << SHELF_BITS; i++) {
        pthread_mutex_lock(&index->shelves[i].lock);
        count += index->shelves[i].count;
        pthread_mutex_unlock(&index->shelves[i].lock);
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
