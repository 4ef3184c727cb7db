/* What the parts of the native library share: calls, results, seals. */
#ifndef KVTIER_NATIVE_H
#define KVTIER_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

/* -------------------------------------------------------------------------------------- seals */

/* The trailer of a chunk, as in kvtier/tiers/_seal.py: little-endian, at these offsets. */
enum {
    SEAL_MAGIC = 0,
    SEAL_VERSION = 8,
    SEAL_KEY_BYTES = 10,
    SEAL_CHECKSUM = 12,
    SEAL_PAYLOAD_BYTES = 16,
    SEAL_DIGEST = 24,
    SEAL_KEY = 40,
    SEAL_ZEROS = 108,
    SEAL_OWN_CHECKSUM = 124,
    SEAL_BYTES = 128,
};
#define DIGEST_BYTES 16
#define MAX_KEY_BYTES 68
#define GROUP_BYTES 4
#define FORMAT_VERSION 1
#define MAGIC_BYTES 8

static inline void put_number(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t get_number(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

uint32_t kvt_crc32c(uint32_t value, const void *data, size_t length);

/* Make the trailer of a chunk whose payload has the given checksum. */
void kvt_seal(uint8_t *trailer, const uint8_t *key, size_t key_bytes, uint32_t checksum, uint64_t length,
              const uint8_t *digest);

/* Whether a trailer is one at all: its magic, version, key length and own checksum. */
bool kvt_is_sealed(const uint8_t *trailer);

/* -------------------------------------------------------------------------------------- calls */

/* What becomes of one chunk: one of these, or a negative errno. Mirrored in tiers/fs/_files/call.py. */
enum {
    RESULT_OK = 0,
    RESULT_EXISTS = 1,
    RESULT_ABSENT = 2,
    RESULT_TORN = 3,
    RESULT_FOREIGN = 4,
    RESULT_CHECKSUM = 5,
};

enum { FLAG_DIRECT = 1, FLAG_SYNC_DATA = 2, FLAG_SYNC_DIRECTORY = 4, FLAG_SHARED = 8 };

/* How files are opened that others may have put there: a FIFO would hold up who opens it otherwise. */
#define CAREFULLY (O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)
#ifndef O_NOATIME
#define O_NOATIME 0
#endif
#define BLOCK_BYTES 4096 /* the trailer's block, and what O_DIRECT is aligned to */

struct index;

/* One put or get of the tier; a job works on a run of its chunks. Mirrored in layouts.py. */
struct call {
    const char *data_dir;    /* of this epoch, relative to root_fd */
    const char *tmp_dir;     /* this writer's own, relative to root_fd */
    const uint8_t *keys;     /* one after the other */
    const uint32_t *key_ends; /* count + 1 offsets into keys, the first is 0 */
    const int64_t *slots;
    const uint32_t *stop; /* not 0: leave what has not begun */
    int32_t *results;
    uint64_t *inodes; /* of files that failed a check */
    uint64_t base;    /* address of slot 0 */
    uint64_t chunk_bytes;
    uint64_t serial; /* names of temporary files: serial + index */
    int32_t root_fd;
    uint32_t flags;
    uint8_t digest[DIGEST_BYTES];
    struct index *index; /* where a pool notes which chunks are there, or NULL */
};

/* 64 bits that stand for a key, as index.fingerprint makes them. */
uint64_t kvt_fingerprint(const uint8_t *key, size_t key_bytes);

/* Note the chunks of a call that were found or put. */
void kvt_index_learn(struct index *index, const struct call *call, size_t first, size_t end);

/* Make the directories above path, the root itself not, for the group too where shared. Returns how many, or -errno. */
int kvt_make_parents(int root_fd, char *path, bool shared);

/* Flush the directory that holds path, and those above it that hold directories just made. */
int kvt_sync_parents(int root_fd, char *path, int made);

/* Open a directory that is no link, and look at it where `here` is not NULL. NULL and errno where that fails. */
DIR *kvt_open_folder(int parent_fd, const char *name, struct stat *here);

/* The next entry of a directory. NULL at its end, or where it cannot be read any further: `error` is errno then. */
static inline struct dirent *kvt_next(DIR *entries, int *error)
{
    errno = 0;
    struct dirent *entry = readdir(entries);
    if (entry == NULL)
        *error = errno;
    return entry;
}

/* The class of a chunk's file, 0 to 4, by how often the chunk was used: ages.CLASS_OF_USES. After the first use the
 * atime is later than the mtime. More uses are in two bits of the mode that mean nothing for a file of data. Where
 * others may do anything with a file the mode is not ours: some file systems have one for all. 060 is a shared root. */
static inline int kvt_class_of_mode(mode_t mode)
{
    return mode & 077 && (mode & 077) != 060 ? 1 : 1 + (mode & S_ISVTX ? 1 : 0) + (mode & S_IXUSR ? 2 : 0);
}

static inline int kvt_class(const struct stat *file)
{
    struct timespec used = file->st_atim, written = file->st_mtim;
    if (used.tv_sec != written.tv_sec ? used.tv_sec < written.tv_sec : used.tv_nsec <= written.tv_nsec)
        return 0;
    return kvt_class_of_mode(file->st_mode);
}

#define LAG_S 60 /* some file systems, such as ZFS, tell only seconds after a write how much a file takes */

/* What a file takes on disk, or its length if that is more and may not be known yet. */
static inline int64_t kvt_disk_bytes(const struct stat *file)
{
    int64_t told = (int64_t)file->st_blocks * 512;
    bool is_new = S_ISREG(file->st_mode) && file->st_mtime >= time(NULL) - LAG_S;
    return is_new && told < file->st_size ? file->st_size : told;
}

static inline bool kvt_is_dot(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

#define FIELD(structure, field) offsetof(struct structure, field), sizeof(((struct structure *)0)->field)

/* Copy the table of a structure's fields, so that Python can compare it with its own. Returns its length. */
static inline size_t kvt_layout(const uint32_t *table, size_t count, uint32_t *out, size_t room)
{
    for (size_t i = 0; i < count && i < room; i++)
        out[i] = table[i];
    return count;
}

static inline bool stopped(const uint32_t *stop) { return __atomic_load_n(stop, __ATOMIC_RELAXED) != 0; }

#endif
