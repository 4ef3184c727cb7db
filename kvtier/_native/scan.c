/* Looking at many chunks' files in one call: their ages, for eviction, and their keys, for the index.
 *
 * A root may hold a million files, and to ask for their times one by one from Python holds up an engine that
 * computes.
 *
 * Only what is called <folder>/<hh>_g<group>/<hash>.bin is a chunk's file. Everything else is somebody else's, and
 * is not looked at.
 */
#include "kvtier_native.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define LEAF_BYTES 16 /* <hh>_g<group>, of ten digits at most */
#define SUB_BITS 8
#define AGE_BITS 50 /* microseconds of 35 years */
#define MOST_AGE INT64_MAX
#define MOST_AHEAD INT64_C(3600000000) /* microseconds by which the clock that dates a file may be ahead */
#define BUCKETS ((AGE_BITS - SUB_BITS + 1) << SUB_BITS)

/* Mirrored in kvtier/_native/layouts.py. */
struct chunk_scan {
    int64_t now_ns;         /* what ages are counted from */
    int64_t want_bytes;     /* removing stops when so many were removed */
    const uint8_t *leaving; /* whether files are removed, for each of CLASSES * BUCKETS, or NULL */
    uint64_t *histogram;    /* bytes by age, BUCKETS numbers for each of CLASSES, or NULL */
    char *names;            /* paths of what was removed, each with a 0 behind it */
    uint64_t names_room;
    uint64_t names_bytes;
    uint64_t seen;
    uint64_t removed;
    int64_t removed_bytes; /* directories that became empty included */
    uint64_t failed;       /* files that cannot be removed, and directories that cannot be read */
    int64_t failed_bytes;  /* of these files */
    int64_t error;         /* errno of the last of them */
};

/* The bucket of an age, as ages.bucket_of does it. */
static size_t bucket_of(int64_t age_us)
{
    uint64_t age = (uint64_t)age_us;
    if (age >> AGE_BITS)
        age = (UINT64_C(1) << AGE_BITS) - 1;
    int bits = age ? 64 - __builtin_clzll(age) : 0;
    int shift = bits > SUB_BITS + 1 ? bits - SUB_BITS - 1 : 0;
    return ((size_t)shift << SUB_BITS) + (size_t)(age >> shift);
}

static size_t hex_digits(const char *text) { return strspn(text, "0123456789abcdef"); }

/* Whether a directory is called <hh>_g<group>, as those are that chunks' files are in. */
static bool is_leaf(const char *name)
{
    if (hex_digits(name) != 2 || name[2] != '_' || name[3] != 'g')
        return false;
    size_t digits = strspn(name + 4, "0123456789");
    return digits > 0 && 4 + digits < LEAF_BYTES - 1 && name[4 + digits] == '\0';
}

static bool is_chunk(const char *name)
{
    size_t digits = hex_digits(name);
    return digits > 0 && digits % 2 == 0 && !strcmp(name + digits, ".bin");
}

DIR *kvt_open_folder(int parent_fd, const char *name, struct stat *here)
{
    int fd = openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = fd < 0 || (here != NULL && fstat(fd, here)) ? NULL : fdopendir(fd);
    if (entries == NULL && fd >= 0) {
        int error = errno;
        close(fd);
        errno = error;
    }
    return entries;
}

/* What is done with one directory of chunks' files; see each_leaf. */
typedef void do_leaf(int parent_fd, const char *name, const uint32_t *stop, void *state);

/* Do something with each <hh>_g<group>/ of a folder. Returns 0 or -errno. */
static int each_leaf(int root_fd, const char *folder, const uint32_t *stop, do_leaf *work, void *state)
{
    DIR *entries = kvt_open_folder(root_fd, folder, NULL);
    if (entries == NULL)
        return -errno;
    int error = 0;
    for (struct dirent *entry; !stopped(stop) && (entry = kvt_next(entries, &error)) != NULL;)
        if (is_leaf(entry->d_name))
            work(dirfd(entries), entry->d_name, stop, state);
    closedir(entries);
    return stopped(stop) ? -ECANCELED : -error;
}

/* --------------------------------------------------------------------------------------- ages */

/* Microseconds since a time. In 128 bits: a file system keeps times whose nanoseconds have more than 64.
 *
 * What lies ahead by more than clocks differ was written while a clock was wrong. It would be the youngest there is
 * until that time has come, and all that is new would leave before it: it is taken for the oldest. */
static int64_t age_of(struct timespec used, int64_t now_ns)
{
    __int128 age = ((__int128)now_ns - (__int128)used.tv_sec * 1000000000 - used.tv_nsec) / 1000;
    return age > MOST_AGE || age < -MOST_AHEAD ? MOST_AGE : age < 0 ? 0 : (int64_t)age;
}

static void note_failure(int error, struct chunk_scan *scan)
{
    if (error == ENOENT) /* somebody else has removed it */
        return;
    scan->failed++;
    scan->error = error;
}

/* Remove a file and write down its path. Where there is no room to write it stays for the next time. */
static bool remove_file(int fd, const char *leaf, const char *name, int64_t bytes, struct chunk_scan *scan)
{
    size_t leaf_length = strlen(leaf), length = leaf_length + 1 + strlen(name) + 1;
    if (scan->names_room - scan->names_bytes < length)
        return false;
    if (unlinkat(fd, name, 0)) {
        if (errno != ENOENT)
            scan->failed_bytes += bytes;
        note_failure(errno, scan);
        return false;
    }
    char *at = scan->names + scan->names_bytes;
    memcpy(at, leaf, leaf_length);
    at[leaf_length] = '/';
    memcpy(at + leaf_length + 1, name, length - leaf_length - 1);
    scan->names_bytes += length;
    return true;
}

/* Add up a file's bytes, and remove it where it is to leave. */
static void scan_file(int fd, const char *leaf, const char *name, const struct stat *found, struct chunk_scan *scan)
{
    int used = kvt_class(found);
    int64_t age_us = age_of(used ? found->st_atim : found->st_mtim, scan->now_ns);
    size_t cell = (size_t)used * BUCKETS + bucket_of(age_us);
    int64_t bytes = kvt_disk_bytes(found);
    scan->seen++;
    if (scan->histogram != NULL)
        scan->histogram[cell] += (uint64_t)bytes;
    if (scan->leaving == NULL || !scan->leaving[cell] || scan->removed_bytes >= scan->want_bytes ||
        !remove_file(fd, leaf, name, bytes, scan))
        return;
    scan->removed++;
    scan->removed_bytes += bytes;
}

static void scan_entry(int fd, const char *leaf, const char *name, dev_t device, struct chunk_scan *scan)
{
    struct stat found;
    if (is_chunk(name) && !fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW) && S_ISREG(found.st_mode) &&
        found.st_dev == device)
        scan_file(fd, leaf, name, &found, scan);
}

static void scan_leaf(int parent_fd, const char *leaf, const uint32_t *stop, void *state)
{
    struct chunk_scan *scan = state;
    struct stat here;
    DIR *entries = kvt_open_folder(parent_fd, leaf, &here);
    if (entries == NULL) {
        note_failure(errno, scan);
        return;
    }
    uint64_t removed_before = scan->removed;
    int error = 0;
    for (struct dirent *entry; !stopped(stop) && (entry = kvt_next(entries, &error)) != NULL;)
        scan_entry(dirfd(entries), leaf, entry->d_name, here.st_dev, scan);
    if (error)
        note_failure(error, scan);
    /* Emptied it may take less than before. It is made again by whoever puts something into it. */
    bool is_known = scan->removed > removed_before && fstat(dirfd(entries), &here) == 0;
    if (is_known && unlinkat(parent_fd, leaf, AT_REMOVEDIR) == 0)
        scan->removed_bytes += (int64_t)here.st_blocks * 512;
    closedir(entries);
}

/* Scan all chunks' files of a directory of the first level. Names are relative to it. Returns 0 or -errno. */
int64_t kvt_chunks_scan(int root_fd, const char *folder, const uint32_t *stop, struct chunk_scan *scan)
{
    return each_leaf(root_fd, folder, stop, scan_leaf, scan);
}

/* ------------------------------------------------------------------------------- fingerprints */

static int digit_of(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; } /* of a hexadecimal one */

/* The fingerprint of the chunk in a file of this name. False: no chunk's. */
static bool fingerprint_of(const char *name, uint64_t group, uint64_t *fingerprint)
{
    uint8_t key[MAX_KEY_BYTES] = {0};
    size_t digits = hex_digits(name), hash_bytes = digits / 2;
    if (!is_chunk(name) || hash_bytes > MAX_KEY_BYTES - GROUP_BYTES || group > UINT32_MAX)
        return false;
    for (size_t i = 0; i < digits; i++)
        key[i / 2] |= (uint8_t)(digit_of(name[i]) << (i % 2 ? 0 : 4));
    for (int i = 0; i < GROUP_BYTES; i++)
        key[hash_bytes + (size_t)i] = (uint8_t)(group >> (8 * (GROUP_BYTES - 1 - i)));
    *fingerprint = kvt_fingerprint(key, hash_bytes + GROUP_BYTES);
    return true;
}

struct listing {
    uint64_t *out;
    uint64_t room, count;
};

static void list_leaf(int parent_fd, const char *leaf, const uint32_t *stop, void *state)
{
    struct listing *list = state;
    DIR *entries = kvt_open_folder(parent_fd, leaf, NULL);
    if (entries == NULL)
        return;
    uint64_t group = strtoull(leaf + 4, NULL, 10), fingerprint = 0;
    int error = 0; /* what is not listed is looked up */
    for (struct dirent *entry; !stopped(stop) && (entry = kvt_next(entries, &error)) != NULL;)
        if (fingerprint_of(entry->d_name, group, &fingerprint) && list->count++ < list->room)
            list->out[list->count - 1] = fingerprint;
    closedir(entries);
}

/* List the fingerprints of the chunks in a directory of the first level. Returns how many there are, of which the
 * first `room` were written, or -errno. */
int64_t kvt_chunks_list(int root_fd, const char *folder, const uint32_t *stop, uint64_t *out, uint64_t room)
{
    struct listing list = {out, room, 0};
    int error = each_leaf(root_fd, folder, stop, list_leaf, &list);
    return error ? error : (int64_t)list.count;
}

/* See kvtier/_native/layouts.py. */
size_t kvt_layout_chunk_scan(uint32_t *out, size_t room)
{
    static const uint32_t table[] = {
        sizeof(struct chunk_scan),
        FIELD(chunk_scan, now_ns), FIELD(chunk_scan, want_bytes), FIELD(chunk_scan, leaving), FIELD(chunk_scan, histogram), FIELD(chunk_scan, names),
        FIELD(chunk_scan, names_room), FIELD(chunk_scan, names_bytes),
        FIELD(chunk_scan, seen), FIELD(chunk_scan, removed), FIELD(chunk_scan, removed_bytes),
        FIELD(chunk_scan, failed), FIELD(chunk_scan, failed_bytes),
        FIELD(chunk_scan, error),
    };
    return kvt_layout(table, sizeof table / sizeof table[0], out, room);
}
