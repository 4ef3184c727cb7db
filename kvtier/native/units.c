/* Units of eviction: every file below an epoch's directory, whatever is in it.
 *
 * A root may hold a million of them, and to ask for their times one by one from Python holds up an
 * engine that computes. So one call looks at all units of a directory, adds up their bytes by age and
 * removes those that are too old. kvtier/tiers/fs/python_files.py does the same in Python.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define MAX_DEPTH 16
#define PATH_BYTES 1024
#define SUB_BITS 8
#define AGE_BITS 50 /* microseconds of 35 years */
#define MOST_AGE (INT64_MAX - 1) /* less than ages.NEVER */
#define BUCKETS ((AGE_BITS - SUB_BITS + 1) << SUB_BITS)

/* Mirrored in kvtier/tiers/fs/units.py. */
struct unit_scan {
    int64_t now_ns;     /* what ages are counted from */
    int64_t once_us;    /* units this old are removed that were not used again after they were written */
    int64_t reused_us;  /* and of the others those that are this old */
    int64_t want_bytes; /* removing stops when so many were removed */
    uint64_t *histogram; /* bytes by age, 2 * BUCKETS numbers, or NULL */
    char *names;        /* paths of what was removed, each with a 0 behind it */
    uint64_t names_room;
    uint64_t names_bytes;
    uint64_t of_segments; /* the directory is that of an epoch's segments, else one of the first level */
    uint64_t seen_units;
    uint64_t removed_units;
    int64_t removed_bytes; /* directories that became empty included */
};

static bool stopped(const uint32_t *stop) { return __atomic_load_n(stop, __ATOMIC_RELAXED) != 0; }

/* The bucket of an age, as ages.bucket_of does it. */
static size_t bucket_of(int64_t age_us)
{
    uint64_t age = age_us < 0 ? 0 : (uint64_t)age_us;
    if (age >> AGE_BITS)
        age = (UINT64_C(1) << AGE_BITS) - 1;
    int bits = age ? 64 - __builtin_clzll(age) : 0;
    int shift = bits > SUB_BITS + 1 ? bits - SUB_BITS - 1 : 0;
    return ((size_t)shift << SUB_BITS) + (size_t)(age >> shift);
}

static size_t hex_digits(const char *text) { return strspn(text, "0123456789abcdef"); }
static size_t decimal_digits(const char *text) { return strspn(text, "0123456789"); }

/* Whether a directory is called <hh>_g<group>/, as those are that chunks' files are in. */
static bool is_leaf(const char *path, size_t length)
{
    return length > 5 && length <= 15 && path[length - 1] == '/' && hex_digits(path) >= 2 && path[2] == '_' &&
           path[3] == 'g' && decimal_digits(path + 4) == length - 5;
}

/* Whether a file is a unit by its name: a segment, a chunk's file, or what a writer of vLLM's own tier has
 * not finished, <hash>.bin_<number>.tmp. Everything else is somebody else's, and is not looked at. */
static bool is_unit(const char *path, size_t length, const char *name, const struct unit_scan *scan)
{
    if (scan->of_segments) {
        size_t end = strlen(name);
        return length == 0 && name[0] != '.' && end > 4 && end <= 95 && !strcmp(name + end - 4, ".seg");
    }
    size_t digits = hex_digits(name);
    if (!is_leaf(path, length) || digits == 0 || digits % 2 || strncmp(name + digits, ".bin", 4))
        return false;
    const char *rest = name + digits + 4;
    return !*rest || (*rest == '_' && decimal_digits(rest + 1) && !strcmp(rest + 1 + decimal_digits(rest + 1), ".tmp"));
}

static bool is_later(struct timespec one, struct timespec other)
{
    return one.tv_sec != other.tv_sec ? one.tv_sec > other.tv_sec : one.tv_nsec > other.tv_nsec;
}

/* Microseconds since a time. In 128 bits: a file system keeps times whose nanoseconds have more than 64. */
static int64_t age_of(struct timespec used, int64_t now_ns)
{
    __int128 age = ((__int128)now_ns - (__int128)used.tv_sec * 1000000000 - used.tv_nsec) / 1000;
    return age > MOST_AGE ? MOST_AGE : age < -MOST_AGE ? -MOST_AGE : (int64_t)age;
}

/* Remove a unit and write down its path. Where there is no room to write it stays for the next time. */
static bool remove_unit(int fd, const char *name, const char *path, size_t length, struct unit_scan *scan)
{
    size_t name_length = strlen(name) + 1;
    if (scan->names_room - scan->names_bytes < length + name_length || unlinkat(fd, name, 0))
        return false;
    memcpy(scan->names + scan->names_bytes, path, length);
    memcpy(scan->names + scan->names_bytes + length, name, name_length);
    scan->names_bytes += length + name_length;
    return true;
}

static bool look_at(int fd, const char *name, const struct stat *found, const char *path, size_t length,
                    struct unit_scan *scan)
{
    bool reused = is_later(found->st_atim, found->st_mtim);
    int64_t age_us = age_of(reused ? found->st_atim : found->st_mtim, scan->now_ns);
    int64_t bytes = (int64_t)found->st_blocks * 512;
    scan->seen_units++;
    if (scan->histogram != NULL)
        scan->histogram[bucket_of(age_us) + (reused ? BUCKETS : 0)] += (uint64_t)bytes;
    if (age_us < (reused ? scan->reused_us : scan->once_us) || scan->removed_bytes >= scan->want_bytes ||
        !remove_unit(fd, name, path, length, scan))
        return false;
    scan->removed_units++;
    scan->removed_bytes += bytes;
    return true;
}

static int scan_folder(int parent_fd, const char *name, char *path, size_t length, const uint32_t *stop,
                       struct unit_scan *scan, int depth, bool *removed);

static void scan_entry(int fd, const char *name, dev_t device, char *path, size_t length, const uint32_t *stop,
                       struct unit_scan *scan, int depth, bool *removed)
{
    struct stat found;
    if (fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW) || found.st_dev != device)
        return;
    if (S_ISREG(found.st_mode)) {
        *removed |= is_unit(path, length, name, scan) && look_at(fd, name, &found, path, length, scan);
        return;
    }
    size_t name_length = strlen(name);
    if (!S_ISDIR(found.st_mode) || depth >= MAX_DEPTH || length + name_length + 1 >= PATH_BYTES)
        return;
    memcpy(path + length, name, name_length);
    path[length + name_length] = '/';
    bool emptied = false;
    scan_folder(fd, name, path, length + name_length + 1, stop, scan, depth + 1, &emptied);
    /* It is made again by whoever puts something into it. */
    if (emptied && unlinkat(fd, name, AT_REMOVEDIR) == 0) {
        scan->removed_bytes += (int64_t)found.st_blocks * 512;
        *removed = true;
    }
}

static int scan_folder(int parent_fd, const char *name, char *path, size_t length, const uint32_t *stop,
                       struct unit_scan *scan, int depth, bool *removed)
{
    int fd = openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    struct stat here;
    DIR *entries = fstat(fd, &here) ? NULL : fdopendir(fd);
    if (entries == NULL) {
        int error = -errno;
        close(fd);
        return error;
    }
    for (struct dirent *entry; !stopped(stop) && (entry = readdir(entries)) != NULL;)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            scan_entry(fd, entry->d_name, here.st_dev, path, length, stop, scan, depth, removed);
    closedir(entries);
    return stopped(stop) ? -ECANCELED : 0;
}

/* Look at all units below a directory of this file system. Names are relative to it. Returns 0 or -errno. */
int64_t kvt_units_scan(int root_fd, const char *folder, const uint32_t *stop, struct unit_scan *scan)
{
    char path[PATH_BYTES];
    bool removed = false;
    return scan_folder(root_fd, folder, path, 0, stop, scan, 0, &removed);
}

/* ------------------------------------------------------------------------------- fingerprints */

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

#define MAX_HASH_WORDS 8 /* of 64 bytes, the longest hash that a key has */
#define FINGERPRINT_PRIME (UINT64_MAX - 58)

/* The fingerprint of the chunk in a file of this name, as index.fingerprint does it. False: no chunk's. */
static bool fingerprint_of(const char *name, uint64_t group, uint64_t *fingerprint)
{
    uint64_t words[MAX_HASH_WORDS] = {0}; /* little-endian, as the bytes of the hash are */
    size_t digits = 0;
    for (int digit; (digit = digit_of(name[digits])) >= 0; digits++) {
        if (digits / 16 >= MAX_HASH_WORDS)
            return false;
        words[digits / 16] |= (uint64_t)digit << (digits % 16 / 2 * 8 + (digits % 2 ? 0 : 4));
    }
    if (digits == 0 || digits % 2 || strcmp(name + digits, ".bin"))
        return false;
    uint64_t value = 0;
    for (int i = MAX_HASH_WORDS - 1; i >= 0; i--)
        value = (uint64_t)(((unsigned __int128)value << 64 | words[i]) % FINGERPRINT_PRIME);
    *fingerprint = value ^ group * UINT64_C(0x9e3779b97f4a7c15);
    return true;
}

static uint64_t list_folder(int parent_fd, const char *name, const uint32_t *stop, uint64_t *out, uint64_t room,
                            uint64_t count)
{
    const char *mark = strstr(name, "_g");
    int fd = mark == NULL ? -1 : openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    if (entries == NULL) {
        if (fd >= 0)
            close(fd);
        return count;
    }
    uint64_t group = strtoull(mark + 2, NULL, 10), fingerprint = 0;
    for (struct dirent *entry; !stopped(stop) && (entry = readdir(entries)) != NULL;)
        if (fingerprint_of(entry->d_name, group, &fingerprint) && count++ < room)
            out[count - 1] = fingerprint;
    closedir(entries);
    return count;
}

/* List the fingerprints of the chunks in <folder>/<hh>_g<group>/. Returns how many there are, of which the
 * first room were written, or -errno. */
int64_t kvt_files_list(int root_fd, const char *folder, const uint32_t *stop, uint64_t *out, uint64_t room)
{
    int fd = openat(root_fd, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    if (entries == NULL) {
        int error = -errno;
        if (fd >= 0)
            close(fd);
        return error;
    }
    uint64_t count = 0;
    for (struct dirent *entry; !stopped(stop) && (entry = readdir(entries)) != NULL;)
        count = list_folder(fd, entry->d_name, stop, out, room, count);
    closedir(entries);
    return stopped(stop) ? -ECANCELED : (int64_t)count;
}
