/* Segments: many chunks in one large file, for chunks that are too small for a file each.
 *
 * A segment belongs to one writer, who appends to it and holds a lock on it until it is sealed. In blocks:
 *
 *     head | map of the dead, one byte a record | extent | extent | ... | footer
 *
 * An extent is what one system call wrote: a block with a head and up to 31 seals, and the chunks' bytes
 * behind it. The footer repeats where the chunks are and their seals, so that opening reads no more than
 * that; it is missing where the writer died, and the extents are walked instead. Nothing is written over,
 * but the map. All numbers are little-endian. kvtier/tiers/fs/segments/ has the same in Python.
 *
 * An index in memory leads from a key to its place. It may know less than the directory holds, never
 * anything else: each chunk is proven by the checksum of its seal when it is read.
 */
#include "kvtier_native.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { /* of a segment, an extent and a footer alike */
    HEAD_MAGIC = 0,
    HEAD_VERSION = 8,
    HEAD_COUNT = 12,       /* u32: blocks of the map; records of an extent; entries of a footer */
    HEAD_CHUNK_BYTES = 16, /* u64 */
    HEAD_DIGEST = 24,
    HEAD_BLOCK = 40,    /* u64: where this block is; of a footer, where it begins */
    HEAD_CAPACITY = 48, /* u64: blocks that the segment may have */
    HEAD_CHECKSUM = 56, /* u32: of a footer's entries */
    HEAD_OWN_CHECKSUM = 124,
    HEAD_BYTES = 128,
};
enum { ENTRY_BLOCK = 0, ENTRY_SEAL = 8, ENTRY_BYTES = 8 + SEAL_BYTES };

#define SEGMENT_VERSION 1
#define EXTENT_RECORDS 31
#define KEY_INLINE 40
#define SLAB_ENTRIES 4096
#define NAME_BYTES 96
#define MAX_PARTS 512         /* of one system call */
#define MAX_RUN_BYTES (8 << 20)
#define MAX_MAP_BLOCKS 64
#define MAX_FOOTER_BYTES (64 << 20)
#define REFRESH_SHARE 20      /* looking after others' segments takes a part of the time at most */
#define REFRESH_CREDIT_NS 50000000
#define CLOCK_GRAIN_NS 50000000
#define MOST_LOST_BYTES (1 << 20)
#define MOST_REMOVED 3 /* segments that a put may find removed before it is given up */
#define HALF_MADE_S 10 /* after which a file without a head is nobody's */
#define NOBODY UINT32_MAX

static const uint8_t segment_magic[MAGIC_BYTES] = {'K', 'V', 'T', 'S', 'E', 'G', 0, 1};
static const uint8_t extent_magic[MAGIC_BYTES] = {'K', 'V', 'T', 'E', 'X', 'T', 0, 1};
static const uint8_t footer_magic[MAGIC_BYTES] = {'K', 'V', 'T', 'E', 'N', 'D', 0, 1};

struct entry { /* 64 bytes a chunk, and 4 to 8 of the table that leads to it */
    uint8_t key[KEY_INLINE]; /* a longer one is elsewhere: its address */
    uint8_t key_bytes;
    bool dead;
    uint8_t unused[2];
    uint32_t checksum;
    uint32_t segment;
    uint32_t block;
    uint32_t next;         /* in its bucket */
    uint32_t next_in_file; /* in its segment */
};

enum state { /* of a segment's file */
    FREE,     /* no segment: the place in the table can be taken */
    WRITING,  /* this process appends to it */
    GROWING,  /* another process appends to it, or one that died did */
    SEALED,   /* nobody does any more */
    GONE,     /* there is no such file; kept until nobody reads it */
};

struct segment {
    char name[NAME_BYTES];
    enum state state;
    int fd, map_fd; /* -1: not open now */
    uint32_t pins, pending;
    uint32_t records, live, first; /* first: of the list of entries */
    uint32_t map_blocks;
    uint64_t next_block, end_block; /* where the next extent goes or is looked for, and where there is none */
    uint64_t used_ms, made_ms;
    int64_t bytes; /* on disk, as far as known */
    bool full;
    bool listed; /* scratch of a listing */
};

struct segments {
    pthread_mutex_t lock, opening, growing, looking;
    int root_fd, dir_fd; /* dir_fd: -1 where there is no such directory yet */
    char writer[NAME_BYTES];
    uint8_t digest[DIGEST_BYTES];
    uint64_t chunk_bytes, chunk_blocks, segment_blocks;
    uint32_t flags, serial;
    uint32_t *buckets, bucket_count, entry_count, free_entry, slab_count;
    struct entry **slabs;
    struct segment **files;
    uint32_t file_count, file_room, current, open_files, most_open, most_map_blocks;
    uint8_t *lost; /* keys of chunks whose files were found to be gone, each behind its length */
    size_t lost_bytes;
    uint64_t torn, foreign;
    int64_t credit_ns;
    uint64_t looked_ns, looks;
    struct timespec listed_at;
    bool listed;
    char path[PATH_MAX]; /* of the directory, relative to root_fd */
};

/* ----------------------------------------------------------------------------- small helpers */

static uint64_t now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t now_ms(void) { return now_ns(CLOCK_REALTIME) / 1000000; }

static void *blocks(size_t bytes)
{
    void *memory = NULL;
    return posix_memalign(&memory, BLOCK_BYTES, bytes ? bytes : BLOCK_BYTES) ? NULL : memory;
}

static uint64_t blocks_of(uint64_t bytes) { return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES; }

static uint64_t data_block(const struct segment *file) { return 1 + file->map_blocks; }

/* The byte of a record in the map: records are at least as far apart as a chunk is long. */
static uint64_t map_index(const struct segments *store, const struct segment *file, uint64_t block)
{
    return (block - data_block(file)) / store->chunk_blocks;
}

static uint64_t map_bytes(uint64_t capacity, uint64_t chunk_blocks) { return capacity / chunk_blocks; }

static uint64_t footer_blocks(uint64_t records) { return blocks_of(records * ENTRY_BYTES) + 1; }

static void write_head(const struct segments *store, uint8_t *head, const uint8_t *magic, uint32_t count,
                       uint64_t block, uint64_t capacity, uint32_t checksum)
{
    memset(head, 0, HEAD_BYTES);
    memcpy(head + HEAD_MAGIC, magic, MAGIC_BYTES);
    put_number(head + HEAD_VERSION, SEGMENT_VERSION, 2);
    put_number(head + HEAD_COUNT, count, 4);
    put_number(head + HEAD_CHUNK_BYTES, store->chunk_bytes, 8);
    memcpy(head + HEAD_DIGEST, store->digest, DIGEST_BYTES);
    put_number(head + HEAD_BLOCK, block, 8);
    put_number(head + HEAD_CAPACITY, capacity, 8);
    put_number(head + HEAD_CHECKSUM, checksum, 4);
    put_number(head + HEAD_OWN_CHECKSUM, kvt_crc32c(0, head, HEAD_OWN_CHECKSUM), 4);
}

static bool is_head(const struct segments *store, const uint8_t *head, const uint8_t *magic)
{
    return memcmp(head + HEAD_MAGIC, magic, MAGIC_BYTES) == 0 &&
           get_number(head + HEAD_VERSION, 2) == SEGMENT_VERSION &&
           get_number(head + HEAD_OWN_CHECKSUM, 4) == kvt_crc32c(0, head, HEAD_OWN_CHECKSUM) &&
           get_number(head + HEAD_CHUNK_BYTES, 8) == store->chunk_bytes &&
           memcmp(head + HEAD_DIGEST, store->digest, DIGEST_BYTES) == 0;
}

/* Read or write all of a buffer. Returns the bytes moved before the end of the file, or -errno. */
static int64_t move_all(int fd, uint8_t *buffer, size_t length, uint64_t offset, bool writing)
{
    size_t done = 0;
    while (done < length) {
        ssize_t moved = writing ? pwrite(fd, buffer + done, length - done, (off_t)(offset + done))
                                : pread(fd, buffer + done, length - done, (off_t)(offset + done));
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0) /* the rest of a short file is not aligned: that is its end */
            return errno == EINVAL && !writing && done ? (int64_t)done : -errno;
        if (moved == 0)
            return writing ? -EIO : (int64_t)done;
        done += (size_t)moved;
    }
    return (int64_t)done;
}

/* The same for parts that follow each other in the file; they are changed. */
static int64_t move_parts(int fd, struct iovec *parts, int count, uint64_t offset, bool writing)
{
    int64_t done = 0;
    while (count > 0) {
        int some = count < MAX_PARTS ? count : MAX_PARTS;
        ssize_t moved = writing ? pwritev(fd, parts, some, (off_t)(offset + (uint64_t)done))
                                : preadv(fd, parts, some, (off_t)(offset + (uint64_t)done));
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return errno == EINVAL && !writing && done ? done : -errno;
        if (moved == 0)
            return writing ? -EIO : done;
        done += moved;
        for (; count > 0 && (size_t)moved >= parts->iov_len; parts++, count--)
            moved -= (ssize_t)parts->iov_len;
        if (count > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + moved;
            parts->iov_len -= (size_t)moved;
        }
    }
    return done;
}

/* ---------------------------------------------------------------------------------- the index */

static struct entry *entry_at(const struct segments *store, uint32_t number)
{
    return &store->slabs[number / SLAB_ENTRIES][number % SLAB_ENTRIES];
}

static const uint8_t *key_of(const struct entry *entry)
{
    const uint8_t *elsewhere;
    if (entry->key_bytes <= KEY_INLINE)
        return entry->key;
    memcpy(&elsewhere, entry->key, sizeof elsewhere);
    return elsewhere;
}

static uint32_t *bucket_of(const struct segments *store, const uint8_t *key, size_t key_bytes)
{
    return &store->buckets[kvt_crc32c(0x9e3779b9u, key, key_bytes) & (store->bucket_count - 1)];
}

/* The first place of a key at or after entry number `from` of its bucket, or NOBODY. */
static uint32_t find_from(const struct segments *store, uint32_t from, const uint8_t *key, size_t key_bytes)
{
    while (from != NOBODY) {
        const struct entry *entry = entry_at(store, from);
        if (entry->key_bytes == key_bytes && memcmp(key_of(entry), key, key_bytes) == 0)
            return from;
        from = entry->next;
    }
    return NOBODY;
}

static uint32_t find(const struct segments *store, const uint8_t *key, size_t key_bytes)
{
    return find_from(store, *bucket_of(store, key, key_bytes), key, key_bytes);
}

static bool widen(struct segments *store)
{
    uint32_t count = store->bucket_count ? store->bucket_count * 2 : 1024;
    uint32_t *wider = malloc(count * sizeof *wider);
    if (wider == NULL)
        return store->bucket_count > 0; /* longer chains, then */
    memset(wider, 0xff, count * sizeof *wider);
    uint32_t *old = store->buckets, old_count = store->bucket_count;
    store->buckets = wider;
    store->bucket_count = count;
    for (uint32_t i = 0; i < old_count; i++)
        for (uint32_t number = old[i], next; number != NOBODY; number = next) {
            struct entry *entry = entry_at(store, number);
            next = entry->next;
            uint32_t *bucket = bucket_of(store, key_of(entry), entry->key_bytes);
            entry->next = *bucket;
            *bucket = number;
        }
    free(old);
    return true;
}

static uint32_t take_entry(struct segments *store)
{
    if (store->free_entry == NOBODY) {
        struct entry **slabs = realloc(store->slabs, (store->slab_count + 1) * sizeof *slabs);
        struct entry *slab = calloc(SLAB_ENTRIES, sizeof *slab);
        if (slabs != NULL)
            store->slabs = slabs;
        if (slabs == NULL || slab == NULL) {
            free(slab);
            return NOBODY;
        }
        uint32_t first = store->slab_count * SLAB_ENTRIES;
        store->slabs[store->slab_count++] = slab;
        for (uint32_t i = SLAB_ENTRIES; i-- > 0; store->free_entry = first + i)
            slab[i].next = store->free_entry;
    }
    uint32_t number = store->free_entry;
    store->free_entry = entry_at(store, number)->next;
    return number;
}

/* Note where a chunk is. Without memory for it the chunk is not found: a miss. */
static uint32_t insert(struct segments *store, uint32_t file, const uint8_t *key, size_t key_bytes,
                       uint64_t block, uint32_t checksum)
{
    if (store->entry_count >= store->bucket_count && !widen(store))
        return NOBODY;
    uint8_t *longer = key_bytes > KEY_INLINE ? malloc(key_bytes) : NULL;
    if (key_bytes > KEY_INLINE && longer == NULL)
        return NOBODY;
    uint32_t number = take_entry(store);
    if (number == NOBODY) {
        free(longer);
        return NOBODY;
    }
    struct entry *entry = entry_at(store, number);
    struct segment *its = store->files[file];
    uint32_t *bucket = bucket_of(store, key, key_bytes);
    *entry = (struct entry){.key_bytes = (uint8_t)key_bytes, .checksum = checksum, .segment = file,
                            .block = (uint32_t)block, .next = *bucket, .next_in_file = its->first};
    if (longer != NULL) {
        memcpy(longer, key, key_bytes);
        memcpy(entry->key, &longer, sizeof longer);
    } else {
        memcpy(entry->key, key, key_bytes);
    }
    *bucket = its->first = number;
    its->records++;
    its->live++;
    store->entry_count++;
    return number;
}

/* Let a chunk not be found any more. Its entry stays with its segment. */
static void forget(struct segments *store, uint32_t number)
{
    struct entry *entry = entry_at(store, number);
    if (entry->dead)
        return;
    uint32_t *at = bucket_of(store, key_of(entry), entry->key_bytes);
    while (*at != number)
        at = &entry_at(store, *at)->next;
    *at = entry->next;
    entry->dead = true;
    store->entry_count--;
    store->files[entry->segment]->live--;
}

static void forget_all(struct segments *store, struct segment *file)
{
    for (uint32_t number = file->first, next; number != NOBODY; number = next) {
        struct entry *entry = entry_at(store, number);
        next = entry->next_in_file;
        forget(store, number);
        if (entry->key_bytes > KEY_INLINE)
            free((void *)(uintptr_t)key_of(entry));
        entry->next = store->free_entry;
        store->free_entry = number;
    }
    file->first = NOBODY;
    file->records = file->live = 0;
}

/* The entry of a place, or NOBODY. */
static uint32_t entry_of(const struct segments *store, const struct segment *file, uint64_t block)
{
    for (uint32_t number = file->first; number != NOBODY; number = entry_at(store, number)->next_in_file)
        if (entry_at(store, number)->block == block)
            return number;
    return NOBODY;
}

/* ----------------------------------------------------------------------------- segments' files */

static void close_files(struct segments *store, struct segment *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        store->open_files--;
    }
    if (file->map_fd >= 0)
        close(file->map_fd);
    file->fd = file->map_fd = -1;
}

/* Where nobody uses a segment that is gone, its place can be taken. */
static void let_go(struct segments *store, struct segment *file)
{
    if (file->state == GONE && file->pins == 0 && file->pending == 0) {
        close_files(store, file);
        file->state = FREE;
    }
}

static void unpin(struct segments *store, struct segment *file)
{
    file->pins--;
    let_go(store, file);
}

/* Keep the keys of a file that is gone, as far as there is room, until somebody asks for them. */
static void note_lost(struct segments *store, const struct segment *file)
{
    if (store->lost == NULL)
        store->lost = malloc(MOST_LOST_BYTES);
    for (uint32_t at = file->first; store->lost && at != NOBODY; at = entry_at(store, at)->next_in_file) {
        const struct entry *entry = entry_at(store, at);
        if (entry->dead || store->lost_bytes + 1 + entry->key_bytes > MOST_LOST_BYTES)
            continue;
        store->lost[store->lost_bytes] = entry->key_bytes;
        memcpy(store->lost + store->lost_bytes + 1, key_of(entry), entry->key_bytes);
        store->lost_bytes += 1 + (size_t)entry->key_bytes;
    }
}

static void lose(struct segments *store, struct segment *file)
{
    if (file->state == FREE || file->state == GONE)
        return;
    note_lost(store, file);
    forget_all(store, file);
    file->state = GONE;
    file->bytes = 0;
    let_go(store, file);
}

/* Let go of the file that was used least recently, where too many are open. Its descriptors are to be
 * closed without the store's lock, which who only asks what is known must not wait for. */
static void close_one(struct segments *store, int *fds)
{
    struct segment *oldest = NULL;
    fds[0] = fds[1] = -1;
    if (store->open_files < store->most_open)
        return;
    for (uint32_t i = 0; i < store->file_count; i++) {
        struct segment *file = store->files[i];
        if (file->state == SEALED && file->fd >= 0 && !file->pins &&
            (oldest == NULL || file->used_ms < oldest->used_ms))
            oldest = file;
    }
    if (oldest == NULL)
        return;
    fds[0] = oldest->fd;
    fds[1] = oldest->map_fd;
    oldest->fd = oldest->map_fd = -1;
    store->open_files--;
}

static int direct_flag(const struct segments *store) { return store->flags & FLAG_DIRECT ? O_DIRECT : 0; }

/* Open a pinned segment's file for reading. Returns whether it is open; errno says why not. Without the
 * store's lock. */
static bool open_file(struct segments *store, struct segment *file)
{
    int flags = O_RDONLY | CAREFULLY, old[2] = {-1, -1}, error = 0;
    pthread_mutex_lock(&store->opening);
    if (file->fd < 0) {
        int fd = openat(store->dir_fd, file->name, flags | direct_flag(store));
        int map_fd = fd < 0 ? -1 : openat(store->dir_fd, file->name, flags);
        error = errno;
        if (map_fd < 0 && fd >= 0)
            close(fd);
        pthread_mutex_lock(&store->lock);
        if (map_fd >= 0) {
            close_one(store, old);
            file->fd = fd;
            file->map_fd = map_fd;
            store->open_files++;
        }
        pthread_mutex_unlock(&store->lock);
    }
    bool is_open = file->fd >= 0;
    pthread_mutex_unlock(&store->opening);
    for (int i = 0; i < 2; i++)
        if (old[i] >= 0)
            close(old[i]);
    errno = error;
    return is_open;
}

static struct segment *add_file(struct segments *store, const char *name, enum state state, uint32_t *number)
{
    uint32_t at = 0;
    while (at < store->file_count && store->files[at]->state != FREE)
        at++;
    if (at == store->file_count) {
        struct segment *file = calloc(1, sizeof *file);
        if (at == store->file_room) {
            uint32_t room = store->file_room ? store->file_room * 2 : 64;
            struct segment **files = realloc(store->files, room * sizeof *files);
            if (files == NULL) {
                free(file);
                return NULL;
            }
            store->files = files;
            store->file_room = room;
        }
        if (file == NULL)
            return NULL;
        store->files[store->file_count++] = file;
    }
    struct segment *file = store->files[at];
    memset(file, 0, sizeof *file);
    snprintf(file->name, sizeof file->name, "%s", name);
    file->state = state;
    file->fd = file->map_fd = -1;
    file->first = NOBODY;
    file->used_ms = file->made_ms = now_ms();
    *number = at;
    return file;
}

static void note_map(struct segments *store, const struct segment *file)
{
    if (file->map_blocks > store->most_map_blocks)
        store->most_map_blocks = file->map_blocks;
}

static int64_t bytes_on_disk(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : (int64_t)found.st_blocks * 512;
}

/* Whether a file was removed under who has it open: then its bytes were counted by who removed it. */
static bool is_removed(int fd)
{
    struct stat found;
    return fstat(fd, &found) == 0 && found.st_nlink == 0;
}

/* ------------------------------------------------------------------------------------ writing */

/* Make the directory, or find it where another process has made it anew. Returns 0 or -errno. */
static int open_directory(struct segments *store, bool make)
{
    char path[PATH_MAX + 2];
    snprintf(path, sizeof path, "%s/.", store->path);
    int made = make ? kvt_make_parents(store->root_fd, path) : 0;
    if (made < 0)
        return made;
    int fd = openat(store->root_fd, store->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -errno;
    if (made > 0 && store->flags & FLAG_SYNC_DIRECTORY)
        kvt_sync_parents(store->root_fd, path, made + 1);
    pthread_mutex_lock(&store->lock);
    if (store->dir_fd >= 0) { /* the same number: others may be about to use it */
        dup3(fd, store->dir_fd, O_CLOEXEC);
        close(fd);
    } else {
        store->dir_fd = fd;
    }
    store->listed = false;
    pthread_mutex_unlock(&store->lock);
    return 0;
}

static int create(struct segments *store, const char *name)
{
    int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | direct_flag(store);
    int fd = store->dir_fd < 0 ? -1 : openat(store->dir_fd, name, flags, 0600);
    if (fd >= 0 || (store->dir_fd >= 0 && errno != ENOENT))
        return fd < 0 ? -errno : fd;
    int error = open_directory(store, true); /* it was removed under us */
    if (error)
        return error;
    fd = openat(store->dir_fd, name, flags, 0600);
    return fd < 0 ? -errno : fd;
}

/* Make a file of the full length that takes no room yet, locked, with its head. Returns 0 or -errno, and
 * leaves nothing then. It has its length from the start: writers that only fill it need not wait for each
 * other in the file system. */
static int make_file(struct segments *store, struct segment *file)
{
    int fd = create(store, file->name), error = 0;
    if (fd < 0)
        return fd;
    uint8_t *head = blocks(BLOCK_BYTES);
    if (head == NULL)
        error = -ENOMEM;
    else if (flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        error = -EAGAIN; /* somebody takes it for the leftover of a dead writer */
    else if (ftruncate(fd, (off_t)(store->segment_blocks * BLOCK_BYTES)))
        error = -errno;
    if (!error) {
        memset(head, 0, BLOCK_BYTES);
        write_head(store, head, segment_magic, file->map_blocks, 0, store->segment_blocks, 0);
        int64_t moved = move_all(fd, head, BLOCK_BYTES, 0, true);
        error = moved < 0 ? (int)moved : 0;
    }
    if (!error && store->flags & FLAG_SYNC_DIRECTORY && (fsync(fd) || fsync(store->dir_fd)))
        error = -errno;
    free(head);
    file->map_fd = error ? -1 : openat(store->dir_fd, file->name, O_RDONLY | CAREFULLY);
    if (!error && file->map_fd < 0)
        error = -errno;
    if (error) {
        unlinkat(store->dir_fd, file->name, 0);
        close(fd);
        return error;
    }
    file->fd = fd;
    return 0;
}

/* Open the next segment. Returns 0 or -errno. With the growing lock, without the store's. */
static int grow(struct segments *store, int64_t *added)
{
    char name[NAME_BYTES];
    uint32_t number;
    pthread_mutex_lock(&store->lock);
    snprintf(name, sizeof name, "%.80s-%08x.seg", store->writer, store->serial++);
    struct segment *file = add_file(store, name, GONE, &number); /* not to be found before it is whole */
    if (file != NULL) {
        file->pins = 1;
        file->map_blocks = (uint32_t)blocks_of(map_bytes(store->segment_blocks, store->chunk_blocks));
    }
    pthread_mutex_unlock(&store->lock);
    if (file == NULL)
        return -ENOMEM;
    int error = make_file(store, file);
    pthread_mutex_lock(&store->lock);
    if (!error) {
        file->state = WRITING;
        file->bytes = BLOCK_BYTES;
        file->next_block = data_block(file);
        uint64_t most = (store->segment_blocks - file->next_block) / store->chunk_blocks;
        file->end_block = store->segment_blocks - footer_blocks(most);
        note_map(store, file);
        store->current = number;
        store->open_files++;
        *added += file->bytes;
    }
    unpin(store, file);
    pthread_mutex_unlock(&store->lock);
    return error;
}

static uint8_t *collect_footer(struct segments *store, struct segment *file, uint64_t *size)
{
    uint64_t most = footer_blocks(file->records) * BLOCK_BYTES;
    uint8_t *footer = blocks(most);
    if (footer == NULL)
        return NULL;
    memset(footer, 0, most);
    uint32_t count = 0;
    for (uint32_t number = file->first; number != NOBODY; number = entry_at(store, number)->next_in_file) {
        const struct entry *entry = entry_at(store, number);
        if (entry->dead)
            continue;
        uint8_t *at = footer + (uint64_t)count++ * ENTRY_BYTES;
        put_number(at + ENTRY_BLOCK, entry->block, 8);
        kvt_seal(at + ENTRY_SEAL, key_of(entry), entry->key_bytes, entry->checksum, store->chunk_bytes,
                 store->digest);
    }
    *size = footer_blocks(count) * BLOCK_BYTES;
    uint8_t *last = footer + *size - BLOCK_BYTES;
    memset(last, 0, BLOCK_BYTES);
    write_head(store, last, footer_magic, count, file->next_block, 0,
               kvt_crc32c(0, footer, (size_t)count * ENTRY_BYTES));
    return footer;
}

/* Write the footer and cut off what was not used. Nobody appends any more; the file is pinned. What fails
 * leaves a segment without a footer, whose extents are walked. Returns the change of bytes on disk. */
static int64_t seal_file(struct segments *store, struct segment *file)
{
    uint64_t size = 0;
    bool removed = is_removed(file->fd);
    pthread_mutex_lock(&store->lock);
    if (removed) {
        lose(store, file);
        pthread_mutex_unlock(&store->lock);
        return 0;
    }
    bool empty = file->live == 0;
    uint8_t *footer = empty ? NULL : collect_footer(store, file, &size);
    uint64_t end = file->next_block * BLOCK_BYTES;
    int64_t before = file->bytes;
    pthread_mutex_unlock(&store->lock);
    if (empty && unlinkat(store->dir_fd, file->name, 0) == 0) {
        pthread_mutex_lock(&store->lock);
        lose(store, file);
        pthread_mutex_unlock(&store->lock);
        return -before;
    }
    bool well = footer != NULL && move_all(file->fd, footer, size, end, true) == (int64_t)size;
    if (well && ftruncate(file->fd, (off_t)(end + size)) == 0 && store->flags & FLAG_SYNC_DATA)
        fdatasync(file->fd);
    free(footer);
    flock(file->fd, LOCK_UN);
    int64_t bytes = bytes_on_disk(file->fd);
    pthread_mutex_lock(&store->lock);
    if (file->state != GONE) {
        file->bytes = bytes;
        file->state = SEALED;
    }
    pthread_mutex_unlock(&store->lock);
    return bytes - before;
}

/* Seal the segment where it is full and nobody writes to it any more. */
static void seal_if_over(struct segments *store, struct segment *file, int64_t *added)
{
    pthread_mutex_lock(&store->lock);
    bool over = file->full && file->pending == 0 && file->state == WRITING;
    if (over) {
        file->full = false; /* by one thread */
        file->pins++;
    }
    pthread_mutex_unlock(&store->lock);
    if (!over)
        return;
    *added += seal_file(store, file);
    pthread_mutex_lock(&store->lock);
    unpin(store, file);
    pthread_mutex_unlock(&store->lock);
}

/* Close the current segment for more extents. With the store's lock. */
static void stop_growing(struct segments *store)
{
    if (store->current != NOBODY)
        store->files[store->current]->full = true;
    store->current = NOBODY;
}

struct space { /* of records that one system call writes */
    struct segment *file;
    uint32_t number;
    uint64_t block;
    size_t records;
    bool written;
};

static uint64_t extent_blocks(const struct segments *store, size_t records)
{
    return (records + EXTENT_RECORDS - 1) / EXTENT_RECORDS + records * store->chunk_blocks;
}

/* Take space for up to `wanted` records in the current segment. With the store's lock. False: it is full. */
static bool take_space(struct segments *store, size_t wanted, struct space *space)
{
    if (store->current == NOBODY)
        return false;
    struct segment *file = store->files[store->current];
    size_t records = wanted;
    while (records && file->next_block + extent_blocks(store, records) > file->end_block)
        records--;
    if (records == 0)
        return false;
    *space = (struct space){file, store->current, file->next_block, records, false};
    file->next_block += extent_blocks(store, records);
    file->pending++;
    return true;
}

/* The same, in a new segment if need be. Returns 0 or -errno. */
static int find_space(struct segments *store, size_t wanted, struct space *space, int64_t *added)
{
    pthread_mutex_lock(&store->lock);
    bool found = take_space(store, wanted, space);
    pthread_mutex_unlock(&store->lock);
    if (found)
        return 0;
    pthread_mutex_lock(&store->growing); /* one thread makes the next segment, the others wait for it */
    pthread_mutex_lock(&store->lock);
    found = take_space(store, wanted, space);
    struct segment *full = !found && store->current != NOBODY ? store->files[store->current] : NULL;
    if (full != NULL)
        full->pins++;
    if (!found)
        stop_growing(store);
    pthread_mutex_unlock(&store->lock);
    int error = found ? 0 : grow(store, added);
    if (!found && !error) {
        pthread_mutex_lock(&store->lock);
        error = take_space(store, wanted, space) ? 0 : -EFBIG;
        pthread_mutex_unlock(&store->lock);
    }
    pthread_mutex_unlock(&store->growing);
    if (full != NULL) {
        seal_if_over(store, full, added);
        pthread_mutex_lock(&store->lock);
        unpin(store, full);
        pthread_mutex_unlock(&store->lock);
    }
    return error;
}

struct record { /* to be written */
    const uint8_t *key;
    size_t key_bytes;
    uint8_t *bytes;
    uint32_t checksum;
    size_t index;                      /* of the call */
    uint32_t source, file, from_block; /* of a copy: the entry and the place that it is of; else NOBODY */
    bool discarded;                    /* while it was copied */
};

static uint64_t block_of(const struct segments *store, const struct space *space, size_t i)
{
    return space->block + i / EXTENT_RECORDS + 1 + i * store->chunk_blocks;
}

/* Write records into their space with one system call. Returns 0 or -errno: -ENOENT where the segment was
 * removed, before or while it was written to, for nobody finds what is in it. */
static int write_records(struct segments *store, struct space *space, const struct record *records)
{
    if (is_removed(space->file->fd))
        return -ENOENT;
    size_t extents = (space->records + EXTENT_RECORDS - 1) / EXTENT_RECORDS;
    uint8_t *heads = blocks(extents * BLOCK_BYTES);
    struct iovec *parts = malloc((extents + space->records) * sizeof *parts);
    int64_t moved = -ENOMEM;
    if (heads != NULL && parts != NULL) {
        int count = 0;
        memset(heads, 0, extents * BLOCK_BYTES);
        for (size_t i = 0; i < space->records; i++) {
            uint8_t *head = heads + i / EXTENT_RECORDS * BLOCK_BYTES;
            size_t within = i % EXTENT_RECORDS, left = space->records - i;
            if (within == 0) {
                write_head(store, head, extent_magic, (uint32_t)(left < EXTENT_RECORDS ? left : EXTENT_RECORDS),
                           block_of(store, space, i) - 1, 0, 0);
                parts[count++] = (struct iovec){head, BLOCK_BYTES};
            }
            kvt_seal(head + HEAD_BYTES + within * SEAL_BYTES, records[i].key, records[i].key_bytes,
                     records[i].checksum, store->chunk_bytes, store->digest);
            parts[count++] = (struct iovec){records[i].bytes, store->chunk_bytes};
        }
        moved = move_parts(space->file->fd, parts, count, space->block * BLOCK_BYTES, true);
        space->written = moved >= 0;
        if (moved >= 0 && store->flags & FLAG_SYNC_DATA && fdatasync(space->file->fd))
            moved = -errno;
        if (moved >= 0 && is_removed(space->file->fd))
            moved = -ENOENT;
    }
    free(parts);
    free(heads);
    return moved < 0 ? (int)moved : 0;
}

/* Whether the source of a copy is still where it was and not discarded. With the store's lock. */
static bool is_there(const struct segments *store, const struct record *record)
{
    const struct entry *entry = entry_at(store, record->source);
    return !entry->dead && entry->segment == record->file && entry->block == record->from_block &&
           entry->key_bytes == record->key_bytes && memcmp(key_of(entry), record->key, record->key_bytes) == 0;
}

static int mark_dead(struct segments *store, const char *name, uint64_t index);

/* Let written records be found, and the segment be sealed where that was the last of it. */
static void publish_records(struct segments *store, const struct space *space, struct record *records, int error,
                            int64_t *added)
{
    struct segment *file = space->file;
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < space->records && !error && file->state == WRITING; i++) {
        struct record *record = &records[i];
        record->discarded = record->source != NOBODY && !is_there(store, record);
        if (record->discarded)
            continue;
        uint32_t number = insert(store, space->number, record->key, record->key_bytes, block_of(store, space, i),
                                 record->checksum);
        if (record->source != NOBODY && number != NOBODY)
            forget(store, record->source);
    }
    if (space->written) { /* who has removed it meanwhile has counted them as well */
        int64_t bytes = (int64_t)(extent_blocks(store, space->records) * BLOCK_BYTES);
        file->bytes += bytes;
        *added += bytes;
    }
    if (error && store->current == space->number) {
        stop_growing(store); /* who walks the extents could not go on here: its footer leads past this */
    }
    file->used_ms = now_ms();
    pthread_mutex_unlock(&store->lock);
    for (size_t i = 0; i < space->records; i++)
        if (records[i].discarded)
            mark_dead(store, file->name, map_index(store, file, block_of(store, space, i)));
    pthread_mutex_lock(&store->lock);
    file->pending--;
    file->pins++;
    pthread_mutex_unlock(&store->lock);
    seal_if_over(store, file, added);
    pthread_mutex_lock(&store->lock);
    unpin(store, file);
    pthread_mutex_unlock(&store->lock);
}

/* ------------------------------------------------------------------------------------ reading */

/* Read the map of the dead. Returns false where the file is no longer there. */
static bool read_map(const struct segment *file, uint8_t *map)
{
    struct stat found;
    size_t bytes = (size_t)file->map_blocks * BLOCK_BYTES;
    if (fstat(file->map_fd, &found))
        return false;
    errno = ENOENT;
    if (found.st_nlink == 0)
        return false;
    int64_t moved = move_all(file->map_fd, map, bytes, BLOCK_BYTES, false);
    if (moved >= 0)
        memset(map + moved, 0, bytes - (size_t)moved);
    else
        errno = (int)-moved;
    return moved >= 0;
}

static uint8_t *new_map(const struct segments *store)
{
    return malloc((size_t)(store->most_map_blocks ? store->most_map_blocks : 1) * BLOCK_BYTES);
}

struct item { /* one chunk of a call, and where it is */
    size_t index;
    struct segment *file;
    uint32_t file_number, block, checksum;
    bool gone, torn;
};

static int by_place(const void *one, const void *other)
{
    const struct item *a = one, *b = other;
    if (a->file_number != b->file_number)
        return a->file_number < b->file_number ? -1 : 1;
    return a->block < b->block ? -1 : a->block > b->block;
}

static bool key_at(const struct call *call, size_t i, const uint8_t **key, size_t *key_bytes)
{
    *key = call->keys + call->key_ends[i];
    *key_bytes = call->key_ends[i + 1] - call->key_ends[i];
    return *key_bytes > GROUP_BYTES && *key_bytes <= MAX_KEY_BYTES;
}

/* Look the chunks up whose result is ABSENT yet, and pin their segments. Returns how many were found. */
static size_t look_up(struct segments *store, const struct call *call, size_t first, size_t end,
                      struct item *items)
{
    size_t count = 0, key_bytes;
    const uint8_t *key;
    uint64_t now = now_ms();
    pthread_mutex_lock(&store->lock);
    for (size_t i = first; i < end; i++) {
        if (call->results[i] != RESULT_ABSENT || !key_at(call, i, &key, &key_bytes) || !store->bucket_count)
            continue;
        uint32_t number = find(store, key, key_bytes);
        if (number == NOBODY)
            continue;
        const struct entry *entry = entry_at(store, number);
        struct segment *file = store->files[entry->segment];
        items[count++] = (struct item){i, file, entry->segment, entry->block, entry->checksum, false,
                                       false};
        file->pins++;
        file->used_ms = now;
    }
    pthread_mutex_unlock(&store->lock);
    qsort(items, count, sizeof *items, by_place);
    return count;
}

static void forget_place(struct segments *store, struct segment *file, uint64_t block)
{
    uint32_t number = entry_of(store, file, block);
    if (number != NOBODY)
        forget(store, number);
}

/* Mark those items gone that others have discarded, or whose file is no longer there. Where it cannot be
 * looked at, that is their result, and they are gone for this call alone. */
static void sort_out(struct segments *store, const struct call *call, struct item *items, size_t count)
{
    uint8_t *map = new_map(store);
    for (size_t i = 0, end; i < count; i = end) {
        struct segment *file = items[i].file;
        for (end = i; end < count && items[end].file == file; end++)
            ;
        bool there = map != NULL && open_file(store, file) && read_map(file, map), lost = false;
        int error = there ? 0 : map == NULL ? ENOMEM : errno;
        for (size_t k = i; k < end; k++) {
            items[k].gone = !there || map[map_index(store, file, items[k].block)] != 0;
            lost |= items[k].gone;
            if (error && error != ENOENT && error != ESTALE)
                call->results[items[k].index] = -error;
        }
        if (!lost || (error && error != ENOENT && error != ESTALE))
            continue;
        pthread_mutex_lock(&store->lock);
        if (error == ESTALE) /* another host has removed it, or the server has forgotten it: look again */
            store->listed = false;
        if (!there && file->state == WRITING) { /* the next put notices it, too, and begins another one */
            note_lost(store, file);
            forget_all(store, file);
        } else if (!there)
            lose(store, file);
        for (size_t k = i; k < end && there; k++)
            if (items[k].gone)
                forget_place(store, file, items[k].block);
        pthread_mutex_unlock(&store->lock);
    }
    free(map);
}

static void unpin_all(struct segments *store, const struct item *items, size_t count)
{
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < count; i++)
        unpin(store, items[i].file);
    pthread_mutex_unlock(&store->lock);
}

static void look_around(struct segments *store, const uint32_t *stop, bool whatever_it_takes);

/* Find a run's chunks, looking for what others have written where some are not known. The results of those
 * found become OK, of the others ABSENT or an error; items are sorted by place, pinned, and not gone. */
static size_t locate(struct segments *store, const struct call *call, size_t first, size_t end,
                     struct item *items)
{
    size_t count = 0, key_bytes;
    const uint8_t *key;
    for (size_t i = first; i < end; i++)
        call->results[i] = stopped(call->stop) ? -ECANCELED : key_at(call, i, &key, &key_bytes) ? RESULT_ABSENT : -EINVAL;
    for (int turn = 0; turn < 2; turn++) {
        size_t found = look_up(store, call, first, end, items + count), kept = 0;
        sort_out(store, call, items + count, found);
        struct item *mine = items + count;
        for (size_t i = 0; i < found; i++) {
            if (mine[i].gone) {
                unpin_all(store, &mine[i], 1);
                continue;
            }
            call->results[mine[i].index] = RESULT_OK;
            mine[kept++] = mine[i];
        }
        count += kept;
        bool missing = false;
        for (size_t i = first; i < end; i++)
            missing |= call->results[i] == RESULT_ABSENT;
        if (!missing || turn)
            break;
        look_around(store, call->stop, false);
    }
    qsort(items, count, sizeof *items, by_place);
    return count;
}

static uint8_t *slot_of(const struct call *call, size_t i)
{
    return (uint8_t *)(uintptr_t)(call->base + (uint64_t)call->slots[i] * call->chunk_bytes);
}

/* Prove one chunk that was read. What a writer has not finished is not there yet, and no damage. */
static void prove(struct segments *store, const struct call *call, struct item *item, bool whole)
{
    bool good = whole && (call->flags & FLAG_BARE || kvt_crc32c(0, slot_of(call, item->index), call->chunk_bytes) ==
                                                         item->checksum);
    if (good)
        return;
    pthread_mutex_lock(&store->lock);
    if (item->file->state == GROWING) {
        store->torn++;
        call->results[item->index] = RESULT_ABSENT;
        forget_place(store, item->file, item->block);
        item->torn = true;
    } else {
        call->results[item->index] = whole ? RESULT_CHECKSUM : RESULT_TORN;
        call->inodes[item->index] = (uint64_t)item->file_number << 32 | item->block;
    }
    pthread_mutex_unlock(&store->lock);
}

/* Read items that follow each other in one file, heads of extents between them, with one system call. */
static void read_run(struct segments *store, const struct call *call, struct item *items, size_t count,
                     uint8_t *between)
{
    struct iovec parts[MAX_PARTS];
    int used = 0;
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && items[i].block > items[i - 1].block + store->chunk_blocks)
            parts[used++] = (struct iovec){between, BLOCK_BYTES};
        parts[used++] = (struct iovec){slot_of(call, items[i].index), call->chunk_bytes};
    }
    uint64_t start = (uint64_t)items[0].block * BLOCK_BYTES;
    int64_t moved = move_parts(items[0].file->fd, parts, used, start, false);
    for (size_t i = 0; i < count; i++) {
        uint64_t end = ((uint64_t)items[i].block + store->chunk_blocks) * BLOCK_BYTES - start;
        if (moved < 0)
            call->results[items[i].index] = (int32_t)moved;
        else
            prove(store, call, &items[i], (uint64_t)moved >= end);
    }
}

/* How many items from here on one system call can read. */
static size_t run_length(const struct segments *store, const struct item *items, size_t count)
{
    size_t length = 1, most = MAX_RUN_BYTES / store->chunk_bytes;
    while (length < count && length < MAX_PARTS / 2 && length < most &&
           items[length].file == items[0].file) {
        uint64_t after = items[length - 1].block + store->chunk_blocks;
        if (items[length].block != after && items[length].block != after + 1)
            break;
        length++;
    }
    return length;
}

/* ------------------------------------------------------------------------------ the four verbs */

/* Get a run of chunks into their slots, each proven by its seal. Returns 0. */
int64_t kvt_segments_get(const struct call *call, size_t first, size_t end)
{
    struct segments *store = call->segments;
    struct item *items = calloc(end - first + 1, sizeof *items);
    uint8_t *between = blocks(BLOCK_BYTES);
    if (items == NULL || between == NULL) {
        for (size_t i = first; i < end; i++)
            call->results[i] = -ENOMEM;
    } else {
        size_t count = locate(store, call, first, end, items);
        for (size_t i = 0, length; i < count; i += length) {
            length = run_length(store, items + i, count - i);
            if (!stopped(call->stop))
                read_run(store, call, items + i, length, between);
            else
                for (size_t k = i; k < i + length; k++)
                    call->results[items[k].index] = -ECANCELED;
        }
        unpin_all(store, items, count);
        for (size_t i = 0; i < count; i++)
            if (items[i].torn) /* that place is forgotten; perhaps there is another one */
                kvt_segments_get(call, items[i].index, items[i].index + 1);
    }
    free(between);
    free(items);
    return 0;
}

/* Ask for a run of chunks whether they are there. */
void kvt_segments_contains(const struct call *call, size_t first, size_t end)
{
    struct item *items = calloc(end - first + 1, sizeof *items);
    if (items == NULL) {
        for (size_t i = first; i < end; i++)
            call->results[i] = -ENOMEM;
        return;
    }
    unpin_all(call->segments, items, locate(call->segments, call, first, end, items));
    free(items);
}

/* Put records, each result by its index. Returns the change of bytes on disk. */
static int64_t put_records(const struct call *call, struct record *records, size_t count)
{
    struct segments *store = call->segments;
    int64_t added = 0;
    int removed = 0;
    for (size_t done = 0; done < count;) {
        struct space space;
        int result = stopped(call->stop) ? -ECANCELED : find_space(store, count - done, &space, &added);
        if (result) {
            for (; done < count; done++)
                call->results[records[done].index] = result;
            break;
        }
        for (size_t i = done; i < done + space.records && !(call->flags & FLAG_BARE); i++)
            records[i].checksum = kvt_crc32c(0, records[i].bytes, store->chunk_bytes);
        result = write_records(store, &space, records + done);
        publish_records(store, &space, records + done, result, &added);
        if (result == -ENOENT && removed++ < MOST_REMOVED)
            continue; /* in the next segment */
        for (size_t i = 0; i < space.records; i++)
            call->results[records[done++].index] = result;
    }
    return added;
}

/* Put a run of chunks. Returns the bytes that the file system has got more. */
int64_t kvt_segments_put(const struct call *call, size_t first, size_t end)
{
    struct segments *store = call->segments;
    struct item *items = calloc(end - first + 1, sizeof *items);
    struct record *records = calloc(end - first + 1, sizeof *records);
    int64_t added = 0;
    if (items == NULL || records == NULL) {
        for (size_t i = first; i < end; i++)
            call->results[i] = -ENOMEM;
    } else {
        size_t count = 0;
        unpin_all(store, items, locate(store, call, first, end, items));
        for (size_t i = first; i < end; i++) {
            if (call->results[i] == RESULT_OK)
                call->results[i] = RESULT_EXISTS;
            if (call->results[i] != RESULT_ABSENT)
                continue;
            struct record *record = &records[count++];
            key_at(call, i, &record->key, &record->key_bytes);
            record->bytes = slot_of(call, i);
            record->index = i;
            record->source = NOBODY;
        }
        added = put_records(call, records, count);
    }
    free(records);
    free(items);
    return added;
}

/* Mark a place in its file's map, for every process and every later one. Returns 0 or -errno. The file's
 * times stay what they were: they tell when it was written and used. */
static int mark_dead(struct segments *store, const char *name, uint64_t index)
{
    uint8_t dead = 1;
    struct stat found;
    int fd = openat(store->dir_fd, name, O_WRONLY | CAREFULLY);
    if (fd < 0)
        return errno == ENOENT ? 0 : -errno;
    int error = fstat(fd, &found) == 0 && pwrite(fd, &dead, 1, (off_t)(BLOCK_BYTES + index)) == 1 ? 0 : -errno;
    if (!error)
        futimens(fd, (struct timespec[2]){{0, UTIME_OMIT}, found.st_mtim});
    if (!error && store->flags & FLAG_SYNC_DATA && fdatasync(fd))
        error = -errno;
    if (close(fd) && !error)
        error = -errno;
    return error;
}

/* Discard every place of a key. Returns OK, ABSENT or -errno. */
static int discard_key(struct segments *store, const uint8_t *key, size_t key_bytes)
{
    int result = RESULT_ABSENT;
    for (;;) {
        char name[NAME_BYTES];
        pthread_mutex_lock(&store->lock);
        uint32_t number = store->bucket_count ? find(store, key, key_bytes) : NOBODY;
        if (number == NOBODY) {
            pthread_mutex_unlock(&store->lock);
            return result;
        }
        const struct entry *entry = entry_at(store, number);
        const struct segment *file = store->files[entry->segment];
        memcpy(name, file->name, sizeof name);
        uint64_t index = map_index(store, file, entry->block);
        forget(store, number);
        pthread_mutex_unlock(&store->lock);
        int error = mark_dead(store, name, index);
        if (result == RESULT_ABSENT || error)
            result = error ? error : RESULT_OK;
    }
}

/* Discard a run of chunks. Their bytes are freed with their segments. Returns 0. */
int64_t kvt_segments_discard(const struct call *call, size_t first, size_t end)
{
    size_t key_bytes;
    const uint8_t *key;
    look_around(call->segments, call->stop, true); /* what is not found now would come back */
    for (size_t i = first; i < end; i++)
        call->results[i] = stopped(call->stop)                     ? -ECANCELED
                           : !key_at(call, i, &key, &key_bytes) ? -EINVAL
                                                                 : discard_key(call->segments, key, key_bytes);
    return 0;
}

/* Set the time of the last use of a run of chunks' segments to now: OK or ABSENT. */
void kvt_segments_touch(const struct call *call, size_t first, size_t end)
{
    struct segments *store = call->segments;
    struct item *items = calloc(end - first + 1, sizeof *items);
    for (size_t i = first; i < end; i++)
        call->results[i] = items == NULL ? -ENOMEM : RESULT_ABSENT;
    size_t count = items == NULL ? 0 : look_up(store, call, first, end, items);
    for (size_t i = 0; i < count; i++) {
        const struct timespec times[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
        int result = i > 0 && items[i].file == items[i - 1].file
                         ? call->results[items[i - 1].index]
                         : utimensat(store->dir_fd, items[i].file->name, times, 0) ? -errno : RESULT_OK;
        call->results[items[i].index] = result == -ENOENT ? RESULT_ABSENT : result;
    }
    if (items != NULL)
        unpin_all(store, items, count);
    free(items);
}

/* ----------------------------------------------------------------------- learning what is there */

/* Take up one seal, where it is one of ours. With the store's lock. */
static void take_up(struct segments *store, uint32_t number, uint64_t block, const uint8_t *trailer,
                    const uint8_t *map, uint64_t size)
{
    struct segment *file = store->files[number];
    size_t key_bytes = get_number(trailer + SEAL_KEY_BYTES, 2);
    if (!kvt_is_sealed(trailer) || key_bytes <= GROUP_BYTES || key_bytes > MAX_KEY_BYTES) {
        store->torn++;
        return;
    }
    if (memcmp(trailer + SEAL_DIGEST, store->digest, DIGEST_BYTES) ||
        get_number(trailer + SEAL_PAYLOAD_BYTES, 8) != store->chunk_bytes) {
        store->foreign++;
        return;
    }
    if (block < data_block(file) || block >= file->end_block || block + store->chunk_blocks > file->end_block ||
        (block + store->chunk_blocks) * BLOCK_BYTES > size) {
        store->torn++;
        return;
    }
    if (map[map_index(store, file, block)])
        return;
    const uint8_t *key = trailer + SEAL_KEY;
    for (uint32_t at = store->bucket_count ? find(store, key, key_bytes) : NOBODY; at != NOBODY;
         at = find_from(store, entry_at(store, at)->next, key, key_bytes))
        if (entry_at(store, at)->segment == number && entry_at(store, at)->block == block)
            return;
    insert(store, number, key, key_bytes, block, (uint32_t)get_number(trailer + SEAL_CHECKSUM, 4));
}

/* Read the footer, where there is a whole one. Returns whether there was. */
static bool load_footer(struct segments *store, uint32_t number, uint64_t size, const uint8_t *map, uint8_t *block)
{
    struct segment *file = store->files[number];
    if (size % BLOCK_BYTES || size < (data_block(file) + 1) * BLOCK_BYTES ||
        move_all(file->fd, block, BLOCK_BYTES, size - BLOCK_BYTES, false) != BLOCK_BYTES ||
        !is_head(store, block, footer_magic))
        return false;
    uint64_t count = get_number(block + HEAD_COUNT, 4), start = get_number(block + HEAD_BLOCK, 8);
    uint64_t bytes = blocks_of(count * ENTRY_BYTES) * BLOCK_BYTES;
    if (bytes > MAX_FOOTER_BYTES || (start + blocks_of(bytes) + 1) * BLOCK_BYTES != size)
        return false;
    uint8_t *entries = blocks(bytes);
    bool well = entries != NULL && move_all(file->fd, entries, bytes, start * BLOCK_BYTES, false) == (int64_t)bytes &&
                kvt_crc32c(0, entries, count * ENTRY_BYTES) == get_number(block + HEAD_CHECKSUM, 4);
    if (well) {
        pthread_mutex_lock(&store->lock);
        for (uint64_t i = 0; i < count && file->state != GONE; i++) {
            const uint8_t *at = entries + i * ENTRY_BYTES;
            take_up(store, number, get_number(at + ENTRY_BLOCK, 8), at + ENTRY_SEAL, map, start * BLOCK_BYTES);
        }
        file->next_block = start;
        if (file->state == GROWING)
            file->state = SEALED;
        pthread_mutex_unlock(&store->lock);
    }
    free(entries);
    return well;
}

/* Whether an extent begins at a block, which is read. */
static bool is_extent(struct segments *store, const struct segment *file, uint64_t at, uint8_t *block)
{
    if (move_all(file->fd, block, BLOCK_BYTES, at * BLOCK_BYTES, false) != BLOCK_BYTES ||
        !is_head(store, block, extent_magic) || get_number(block + HEAD_BLOCK, 8) != at)
        return false;
    uint64_t count = get_number(block + HEAD_COUNT, 4);
    return count > 0 && count <= EXTENT_RECORDS;
}

/* Find the next extent behind one that a dead writer has not finished: it wrote others at the same time, and
 * may have promised that they stay. Returns its block, which is read, or the end where there is none. */
static uint64_t next_extent(struct segments *store, const struct segment *file, uint8_t *block,
                            const uint32_t *stop)
{
    for (uint64_t at = file->next_block + 1; at < file->end_block && !stopped(stop); at++) {
        off_t data = lseek(file->fd, (off_t)(at * BLOCK_BYTES), SEEK_DATA); /* past what was never written */
        if (data < 0 && errno == ENXIO)
            break;
        if (data > 0 && (uint64_t)data / BLOCK_BYTES > at)
            at = (uint64_t)data / BLOCK_BYTES;
        if (at < file->end_block && is_extent(store, file, at, block))
            return at;
    }
    return file->end_block;
}

/* Walk the extents from where the last walk ended to the first that is not whole: its writer may be at it.
 * Where the writer is dead, go on behind it. */
static void walk_extents(struct segments *store, uint32_t number, uint64_t size, const uint8_t *map,
                         uint8_t *block, bool is_dead, const uint32_t *stop)
{
    struct segment *file = store->files[number];
    while (!stopped(stop) && file->next_block < file->end_block) {
        uint64_t at = file->next_block;
        if (!is_extent(store, file, at, block))
            at = is_dead ? next_extent(store, file, block, stop) : file->end_block;
        if (at >= file->end_block)
            return;
        uint64_t count = get_number(block + HEAD_COUNT, 4);
        pthread_mutex_lock(&store->lock);
        for (uint64_t i = 0; i < count && file->state != GONE; i++)
            take_up(store, number, at + 1 + i * store->chunk_blocks, block + HEAD_BYTES + i * SEAL_BYTES, map, size);
        file->next_block = at + 1 + count * store->chunk_blocks;
        pthread_mutex_unlock(&store->lock);
    }
}

/* Whether a segment without a footer was left by a dead writer: the living hold a lock. */
static bool is_left(const struct segment *file)
{
    if (flock(file->fd, LOCK_SH | LOCK_NB))
        return false;
    flock(file->fd, LOCK_UN);
    return true;
}

/* Learn what another process has written to a segment since the last time. The file is pinned and open. */
static void read_more(struct segments *store, uint32_t number, bool is_dead, const uint32_t *stop)
{
    struct segment *file = store->files[number];
    struct stat found;
    uint8_t *block = blocks(BLOCK_BYTES), *map = new_map(store);
    if (block != NULL && map != NULL && fstat(file->fd, &found) == 0 && read_map(file, map)) {
        uint64_t size = (uint64_t)found.st_size;
        if (!load_footer(store, number, size, map, block))
            walk_extents(store, number, size, map, block, is_dead, stop);
        pthread_mutex_lock(&store->lock);
        if (file->state != GONE)
            file->bytes = (int64_t)found.st_blocks * 512;
        pthread_mutex_unlock(&store->lock);
    }
    free(map);
    free(block);
}

/* Read a new segment's head. Returns whether it is a segment of ours. */
static bool read_head(struct segments *store, struct segment *file)
{
    uint8_t *head = blocks(BLOCK_BYTES);
    bool well = head != NULL && move_all(file->fd, head, BLOCK_BYTES, 0, false) == BLOCK_BYTES &&
                is_head(store, head, segment_magic);
    if (well) {
        uint64_t capacity = get_number(head + HEAD_CAPACITY, 8);
        file->map_blocks = (uint32_t)get_number(head + HEAD_COUNT, 4);
        file->next_block = data_block(file);
        file->end_block = capacity;
        well = file->map_blocks <= MAX_MAP_BLOCKS && capacity < UINT32_MAX &&
               map_bytes(capacity, store->chunk_blocks) <= (uint64_t)file->map_blocks * BLOCK_BYTES;
    }
    free(head);
    return well;
}

/* Take up a file that was not known. Returns false where it should be looked at again: it may be half made. */
static bool meet(struct segments *store, const char *name, const uint32_t *stop)
{
    uint32_t number;
    struct stat found = {0};
    pthread_mutex_lock(&store->lock);
    struct segment *file = add_file(store, name, GROWING, &number);
    if (file != NULL)
        file->pins++;
    pthread_mutex_unlock(&store->lock);
    if (file == NULL)
        return false;
    bool there = open_file(store, file) && fstat(file->fd, &found) == 0, ours = there && read_head(store, file);
    if (ours) {
        pthread_mutex_lock(&store->lock);
        note_map(store, file);
        file->made_ms = file->used_ms =
            (uint64_t)found.st_mtim.tv_sec * 1000 + (uint64_t)found.st_mtim.tv_nsec / 1000000;
        pthread_mutex_unlock(&store->lock);
        read_more(store, number, is_left(file), stop);
    }
    pthread_mutex_lock(&store->lock);
    if (!ours)
        lose(store, file);
    unpin(store, file);
    pthread_mutex_unlock(&store->lock);
    return ours || (there && now_ns(CLOCK_REALTIME) / 1000000000u > (uint64_t)found.st_mtim.tv_sec + HALF_MADE_S);
}

static bool is_segment_name(const char *name)
{
    size_t length = strlen(name);
    return length > 4 && length < NAME_BYTES && strcmp(name + length - 4, ".seg") == 0 && name[0] != '.';
}

static int by_name(const void *one, const void *other)
{
    return strcmp((*(struct segment *const *)one)->name, (*(struct segment *const *)other)->name);
}

static int name_to_file(const void *name, const void *file)
{
    return strcmp(name, (*(struct segment *const *)file)->name);
}

/* List the directory: note what is new in `names`, one after the other; mark what is known. */
static char *list_names(struct segments *store, DIR *entries, struct segment **known, size_t count)
{
    size_t used = 0, room = 4096;
    char *names = malloc(room);
    for (struct dirent *entry; names != NULL && (entry = readdir(entries)) != NULL;) {
        if (!is_segment_name(entry->d_name))
            continue;
        struct segment **found = count ? bsearch(entry->d_name, known, count, sizeof *known, name_to_file) : NULL;
        if (found != NULL) {
            (*found)->listed = true;
            continue;
        }
        size_t length = strlen(entry->d_name) + 1;
        if (used + length + 1 > room) {
            char *larger = realloc(names, room *= 2);
            if (larger == NULL)
                break;
            names = larger;
        }
        memcpy(names + used, entry->d_name, length);
        used += length;
    }
    if (names != NULL)
        names[used] = '\0';
    (void)store;
    return names;
}

/* Compare the directory with what is known of it. With the looking lock, without the store's. */
static bool list_again(struct segments *store, const uint32_t *stop)
{
    bool all = true;
    int fd = openat(store->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = fd >= 0 ? fdopendir(fd) : NULL;
    if (entries == NULL) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    pthread_mutex_lock(&store->lock);
    struct segment **known = malloc((store->file_count + 1) * sizeof *known);
    size_t count = 0;
    for (uint32_t i = 0; known != NULL && i < store->file_count; i++)
        if (store->files[i]->state != FREE) {
            store->files[i]->listed = store->files[i]->state == WRITING || store->files[i]->pins;
            known[count++] = store->files[i];
        }
    pthread_mutex_unlock(&store->lock);
    if (known != NULL)
        qsort(known, count, sizeof *known, by_name);
    char *names = known != NULL ? list_names(store, entries, known, count) : NULL;
    closedir(entries);
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; names != NULL && i < count; i++)
        if (!known[i]->listed)
            lose(store, known[i]);
    pthread_mutex_unlock(&store->lock);
    for (char *name = names; name != NULL && *name; name += strlen(name) + 1)
        all &= !stopped(stop) && meet(store, name, stop);
    free(names);
    free(known);
    return all && names != NULL;
}

/* Learn which files there are, where the directory has changed. With the looking lock. */
static void look_for_files(struct segments *store, const uint32_t *stop)
{
    struct stat found;
    if (fstat(store->dir_fd, &found) || found.st_nlink == 0)
        if (open_directory(store, false) || fstat(store->dir_fd, &found))
            return;
    if (store->listed && found.st_mtim.tv_sec == store->listed_at.tv_sec &&
        found.st_mtim.tv_nsec == store->listed_at.tv_nsec)
        return;
    uint64_t changed = (uint64_t)found.st_mtim.tv_sec * 1000000000u + (uint64_t)found.st_mtim.tv_nsec;
    /* What happens within the clock's grain after a change does not change the directory's time. */
    bool settled = now_ns(CLOCK_REALTIME) > changed + CLOCK_GRAIN_NS;
    store->listed = list_again(store, stop) && settled;
    store->listed_at = found.st_mtim;
}

/* Pin the segment that another process appends to, at `*number` or after it. NULL: there is none. */
static struct segment *next_growing(struct segments *store, uint32_t *number)
{
    struct segment *found = NULL;
    pthread_mutex_lock(&store->lock);
    for (; found == NULL && *number < store->file_count; ++*number)
        if (store->files[*number]->state == GROWING)
            found = store->files[*number];
    if (found != NULL)
        found->pins++;
    pthread_mutex_unlock(&store->lock);
    return found;
}

/* Learn what others have done since the last time. With the looking lock. */
static void look(struct segments *store, const uint32_t *stop)
{
    struct segment *file;
    look_for_files(store, stop);
    for (uint32_t next = 0; !stopped(stop) && (file = next_growing(store, &next)) != NULL;) {
        if (open_file(store, file))
            read_more(store, next - 1, false, stop);
        unpin_all(store, &(struct item){.file = file}, 1);
    }
    store->looks++;
}

/* The same as far as the time that it may take allows. Whoever finds somebody at it has it done by waiting. */
static void look_around(struct segments *store, const uint32_t *stop, bool whatever_it_takes)
{
    uint64_t looks = __atomic_load_n(&store->looks, __ATOMIC_RELAXED);
    pthread_mutex_lock(&store->looking);
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    store->credit_ns += (int64_t)((now - store->looked_ns) / REFRESH_SHARE);
    if (store->credit_ns > REFRESH_CREDIT_NS)
        store->credit_ns = REFRESH_CREDIT_NS;
    store->looked_ns = now;
    if (whatever_it_takes || (store->credit_ns > 0 && looks == store->looks)) {
        look(store, stop);
        uint64_t then = now_ns(CLOCK_MONOTONIC);
        store->credit_ns -= (int64_t)(then - now);
        store->looked_ns = then;
    }
    pthread_mutex_unlock(&store->looking);
}

/* ------------------------------------------------------------------------- opening and closing */

/* Open the segments of one epoch: what is there is learned by kvt_segments_load. NULL: no memory.
 *
 * root_fd, path: the directory, which need not be there; writer: a name that nobody else has;
 * segment_bytes: length of new segments; most_open: how many of their files may be open at once. */
struct segments *kvt_segments_open(int root_fd, const char *path, const char *writer, const uint8_t *digest,
                                   uint64_t chunk_bytes, uint64_t segment_bytes, uint32_t flags,
                                   uint32_t most_open)
{
    struct segments *store = calloc(1, sizeof *store);
    if (store == NULL)
        return NULL;
    pthread_mutex_init(&store->lock, NULL);
    pthread_mutex_init(&store->opening, NULL);
    pthread_mutex_init(&store->growing, NULL);
    pthread_mutex_init(&store->looking, NULL);
    store->root_fd = root_fd;
    store->dir_fd = -1;
    snprintf(store->path, sizeof store->path, "%s", path);
    snprintf(store->writer, sizeof store->writer, "%.80s", writer);
    memcpy(store->digest, digest, DIGEST_BYTES);
    store->chunk_bytes = chunk_bytes;
    store->chunk_blocks = chunk_bytes / BLOCK_BYTES;
    store->segment_blocks = segment_bytes / BLOCK_BYTES;
    store->flags = flags;
    store->most_open = most_open;
    store->current = store->free_entry = NOBODY;
    store->credit_ns = REFRESH_CREDIT_NS;
    store->looked_ns = now_ns(CLOCK_MONOTONIC);
    return store;
}

/* Learn all that is there. Returns how many chunks are known. */
int64_t kvt_segments_load(struct segments *store, const uint32_t *stop)
{
    pthread_mutex_lock(&store->looking);
    look(store, stop);
    pthread_mutex_unlock(&store->looking);
    return store->entry_count;
}

/* Seal the current segment. Returns the change of bytes on disk. No put is under way. */
int64_t kvt_segments_finish(struct segments *store)
{
    int64_t added = 0;
    pthread_mutex_lock(&store->lock);
    struct segment *file = store->current != NOBODY ? store->files[store->current] : NULL;
    stop_growing(store);
    pthread_mutex_unlock(&store->lock);
    if (file != NULL)
        seal_if_over(store, file, &added);
    return added;
}

/* Forget everything and free it. Nothing is under way. */
void kvt_segments_close(struct segments *store)
{
    for (uint32_t i = 0; i < store->file_count; i++) {
        store->files[i]->pins = 0;
        store->files[i]->pending = 0;
        lose(store, store->files[i]);
        close_files(store, store->files[i]);
        free(store->files[i]);
    }
    for (uint32_t i = 0; i < store->slab_count; i++)
        free(store->slabs[i]);
    free(store->slabs);
    free(store->files);
    free(store->buckets);
    free(store->lost);
    if (store->dir_fd >= 0)
        close(store->dir_fd);
    pthread_mutex_destroy(&store->lock);
    pthread_mutex_destroy(&store->opening);
    pthread_mutex_destroy(&store->growing);
    pthread_mutex_destroy(&store->looking);
    free(store);
}

/* -------------------------------------------------------------------------------------- upkeep */

struct segment_info { /* mirrored in tiers/fs/segments/native_segments.py */
    uint32_t number, state, records, live;
    int64_t bytes;
    uint64_t used_ms, made_ms;
    char name[NAME_BYTES];
};

/* Describe up to `room` segments. Returns how many there are. */
size_t kvt_segments_list(struct segments *store, struct segment_info *infos, size_t room)
{
    size_t count = 0;
    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < store->file_count; i++) {
        const struct segment *file = store->files[i];
        if (file->state == FREE || file->state == GONE)
            continue;
        if (count < room) {
            struct segment_info *info = &infos[count];
            *info = (struct segment_info){i,           file->state,   file->records, file->live,
                                          file->bytes, file->used_ms, file->made_ms, {0}};
            memcpy(info->name, file->name, NAME_BYTES);
        }
        count++;
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}

/* Copy the living keys of a segment, each behind a byte with its length. Returns the bytes needed. */
size_t kvt_segments_keys(struct segments *store, uint32_t number, uint8_t *into, size_t room)
{
    size_t needed = 0;
    pthread_mutex_lock(&store->lock);
    uint32_t at = number < store->file_count ? store->files[number]->first : NOBODY;
    for (; at != NOBODY; at = entry_at(store, at)->next_in_file) {
        const struct entry *entry = entry_at(store, at);
        if (entry->dead)
            continue;
        if (needed + 1 + entry->key_bytes <= room) {
            into[needed] = entry->key_bytes;
            memcpy(into + needed + 1, key_of(entry), entry->key_bytes);
        }
        needed += 1 + (size_t)entry->key_bytes;
    }
    pthread_mutex_unlock(&store->lock);
    return needed;
}

/* Give the fingerprints of the living keys of a segment, up to `room`. Returns how many there are. */
size_t kvt_segments_marks(struct segments *store, uint32_t number, uint64_t *marks, size_t room)
{
    size_t count = 0;
    pthread_mutex_lock(&store->lock);
    uint32_t at = number < store->file_count ? store->files[number]->first : NOBODY;
    for (; at != NOBODY; at = entry_at(store, at)->next_in_file) {
        const struct entry *entry = entry_at(store, at);
        if (!entry->dead && count++ < room)
            marks[count - 1] = kvt_fingerprint(key_of(entry), entry->key_bytes);
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}

/* Chunks that are known, of them such as were torn or foreign when they were looked at. */
void kvt_segments_counts(struct segments *store, uint64_t *counts)
{
    pthread_mutex_lock(&store->lock);
    counts[0] = store->entry_count;
    counts[1] = store->torn;
    counts[2] = store->foreign;
    counts[3] = (uint64_t)store->slab_count * SLAB_ENTRIES * sizeof(struct entry) +
                (uint64_t)store->bucket_count * sizeof(uint32_t);
    pthread_mutex_unlock(&store->lock);
}

/* Discard the chunk at a place, which has failed its check. Returns 0 or -errno. */
int64_t kvt_segments_kill(struct segments *store, uint32_t number, uint32_t block)
{
    char name[NAME_BYTES];
    pthread_mutex_lock(&store->lock);
    if (number >= store->file_count || store->files[number]->state == FREE || store->files[number]->state == GONE) {
        pthread_mutex_unlock(&store->lock);
        return 0;
    }
    struct segment *file = store->files[number];
    memcpy(name, file->name, sizeof name);
    uint64_t index = map_index(store, file, block);
    forget_place(store, file, block);
    pthread_mutex_unlock(&store->lock);
    return mark_dead(store, name, index);
}

/* Remove a segment. Returns the bytes that the file system has got less, or -errno. */
int64_t kvt_segments_drop(struct segments *store, uint32_t number)
{
    char name[NAME_BYTES];
    pthread_mutex_lock(&store->lock);
    struct segment *file = number < store->file_count ? store->files[number] : NULL;
    if (file == NULL || (file->state != SEALED && file->state != GROWING)) {
        pthread_mutex_unlock(&store->lock);
        return 0;
    }
    memcpy(name, file->name, sizeof name);
    int64_t bytes = file->bytes;
    pthread_mutex_unlock(&store->lock);
    if (unlinkat(store->dir_fd, name, 0))
        return errno == ENOENT ? 0 : -errno;
    pthread_mutex_lock(&store->lock);
    lose(store, file);
    pthread_mutex_unlock(&store->lock);
    return bytes;
}

struct copy { /* of living records into the current segment */
    struct record *records;
    uint8_t *keys, *bytes;
    size_t count, room;
};

static bool make_copy(struct copy *copy, size_t room, uint64_t chunk_bytes)
{
    *copy = (struct copy){calloc(room, sizeof *copy->records), malloc(room * MAX_KEY_BYTES),
                          blocks(room * chunk_bytes), 0, room};
    return copy->records && copy->keys && copy->bytes;
}

static void free_copy(struct copy *copy)
{
    free(copy->records);
    free(copy->keys);
    free(copy->bytes);
}

/* Choose what to copy next: from entry `*at` on. With the store's lock. */
static void choose(const struct segments *store, struct copy *copy, uint32_t *at)
{
    for (copy->count = 0; *at != NOBODY && copy->count < copy->room; *at = entry_at(store, *at)->next_in_file) {
        const struct entry *entry = entry_at(store, *at);
        if (entry->dead)
            continue;
        size_t i = copy->count++;
        memcpy(copy->keys + i * MAX_KEY_BYTES, key_of(entry), entry->key_bytes);
        copy->records[i] = (struct record){.key = copy->keys + i * MAX_KEY_BYTES, .key_bytes = entry->key_bytes,
                                           .bytes = copy->bytes + i * store->chunk_bytes,
                                           .checksum = entry->checksum, .source = *at,
                                           .file = entry->segment, .from_block = entry->block};
    }
}

/* Read what was chosen. Returns false where something fails its check: its next get sees to that. */
static bool read_copy(const struct segments *store, const struct segment *file, struct copy *copy)
{
    size_t kept = 0;
    for (size_t i = 0; i < copy->count; i++) {
        struct record record = copy->records[i];
        uint64_t offset = (uint64_t)record.from_block * BLOCK_BYTES;
        if (move_all(file->fd, record.bytes, store->chunk_bytes, offset, false) == (int64_t)store->chunk_bytes &&
            (store->flags & FLAG_BARE || kvt_crc32c(0, record.bytes, store->chunk_bytes) == record.checksum))
            copy->records[kept++] = record;
    }
    bool all = kept == copy->count;
    copy->count = kept;
    return all;
}

static int write_copy(struct segments *store, const struct copy *copy, int64_t *added)
{
    for (size_t done = 0; done < copy->count;) {
        struct space space;
        int error = find_space(store, copy->count - done, &space, added);
        if (error)
            return error;
        error = write_records(store, &space, copy->records + done);
        publish_records(store, &space, copy->records + done, error, added);
        if (error)
            return error;
        done += space.records;
    }
    return 0;
}

/* Copy the living records of a sealed segment into the current one. `added`: change of bytes on disk.
 * Returns the records copied, or -errno; -EIO where some could not be read. */
int64_t kvt_segments_copy(struct segments *store, uint32_t number, const uint32_t *stop, int64_t *added)
{
    struct copy copy;
    size_t room = MAX_RUN_BYTES / store->chunk_bytes;
    int error = make_copy(&copy, room ? room : 1, store->chunk_bytes) ? 0 : -ENOMEM;
    int64_t copied = 0;
    *added = 0;
    pthread_mutex_lock(&store->lock);
    struct segment *file = number < store->file_count ? store->files[number] : NULL;
    bool there = !error && file != NULL && file->state == SEALED;
    if (there)
        file->pins++;
    pthread_mutex_unlock(&store->lock);
    there = there && (open_file(store, file) || (unpin_all(store, &(struct item){.file = file}, 1), false));
    uint8_t *map = new_map(store);
    if (there && (map == NULL || !read_map(file, map)))
        error = -ENOENT;
    else if (there && flock(file->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        error = -EAGAIN; /* another process does it; the lock ends with the descriptor */
    pthread_mutex_lock(&store->lock);
    for (uint32_t at = there ? file->first : NOBODY; !error && at != NOBODY; at = entry_at(store, at)->next_in_file)
        if (map[map_index(store, file, entry_at(store, at)->block)]) /* others have discarded it */
            forget(store, at);
    for (uint32_t at = there ? file->first : NOBODY; at != NOBODY && !error && file->state == SEALED;) {
        choose(store, &copy, &at);
        pthread_mutex_unlock(&store->lock);
        bool all = read_copy(store, file, &copy);
        error = stopped(stop) ? -ECANCELED : write_copy(store, &copy, added);
        error = error ? error : all ? 0 : -EIO;
        copied += (int64_t)copy.count;
        pthread_mutex_lock(&store->lock);
    }
    if (there)
        unpin(store, file);
    pthread_mutex_unlock(&store->lock);
    free(map);
    free_copy(&copy);
    return error ? error : copied;
}

/* Check each record of a segment whose writer is dead, and forget those that are torn. */
static void check_all(struct segments *store, struct segment *file, const uint32_t *stop)
{
    uint8_t *bytes = blocks(store->chunk_bytes);
    pthread_mutex_lock(&store->lock);
    for (uint32_t at = file->first; bytes != NULL && at != NOBODY && !stopped(stop);) {
        const struct entry *entry = entry_at(store, at);
        uint64_t offset = (uint64_t)entry->block * BLOCK_BYTES;
        uint32_t checksum = entry->checksum;
        bool dead = entry->dead;
        pthread_mutex_unlock(&store->lock);
        bool good = dead || (move_all(file->fd, bytes, store->chunk_bytes, offset, false) == (int64_t)store->chunk_bytes &&
                             (store->flags & FLAG_BARE || kvt_crc32c(0, bytes, store->chunk_bytes) == checksum));
        pthread_mutex_lock(&store->lock);
        if (file->state != GROWING)
            break;
        if (!good && !entry_at(store, at)->dead) {
            store->torn++;
            forget(store, at);
        }
        at = entry_at(store, at)->next_in_file;
    }
    pthread_mutex_unlock(&store->lock);
    free(bytes);
}

/* Seal a segment whose writer is dead. Returns 1 if it was, 0 where the writer lives. */
static int adopt(struct segments *store, uint32_t number, const uint32_t *stop, int64_t *added)
{
    struct segment *file = store->files[number];
    int fd = openat(store->dir_fd, file->name, O_RDWR | CAREFULLY | direct_flag(store));
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB)) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    read_more(store, number, true, stop); /* all that the dead has written */
    check_all(store, file, stop);
    pthread_mutex_lock(&store->lock);
    bool mine = file->state == GROWING && !stopped(stop);
    if (mine)
        /* To be written through, and locked until it is sealed. The same number: others may be reading. */
        dup3(fd, file->fd, O_CLOEXEC);
    pthread_mutex_unlock(&store->lock);
    close(fd);
    if (mine)
        *added += seal_file(store, file);
    return mine;
}

/* Seal what dead writers have left. Returns the change of bytes on disk. */
int64_t kvt_segments_adopt(struct segments *store, const uint32_t *stop)
{
    int64_t added = 0;
    struct segment *file;
    pthread_mutex_lock(&store->looking);
    for (uint32_t next = 0; !stopped(stop) && (file = next_growing(store, &next)) != NULL;) {
        if (open_file(store, file))
            adopt(store, next - 1, stop, &added);
        unpin_all(store, &(struct item){.file = file}, 1);
    }
    pthread_mutex_unlock(&store->looking);
    return added;
}

/* Take the keys of chunks whose files are gone, each behind a byte with its length. Returns the bytes. */
size_t kvt_segments_lost(struct segments *store, uint8_t *into, size_t room)
{
    pthread_mutex_lock(&store->lock);
    size_t bytes = store->lost_bytes;
    if (bytes > 0 && bytes <= room) {
        memcpy(into, store->lost, bytes);
        store->lost_bytes = 0;
    }
    pthread_mutex_unlock(&store->lock);
    return bytes;
}

/* Forget a segment that this process has removed. */
void kvt_segments_forget(struct segments *store, uint32_t number)
{
    pthread_mutex_lock(&store->lock);
    if (number < store->file_count && store->files[number]->state == WRITING) {
        note_lost(store, store->files[number]);
        forget_all(store, store->files[number]); /* the next put notices, and begins another one */
    } else if (number < store->file_count)
        lose(store, store->files[number]);
    pthread_mutex_unlock(&store->lock);
}
