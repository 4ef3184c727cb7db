/* Stands in front of the C library and makes its calls fail, or reads give a wrong bit. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPENAT, PREADV, PWRITEV, PREAD, PWRITE, RENAMEAT,
       FDATASYNC, FSYNC, MKDIRAT, UNLINKAT, FSTATAT, UTIMENSAT, READDIR };
/* A call fails if its bit is in `calls`: always, or with `every` > 1 about one time in so many. */
/* One large read in `flips` gives a wrong bit, if that is not 0. */
/* Files seem to take one block while `lags` is not 0, as on ZFS for seconds after a write. */
struct { unsigned calls; int error; unsigned every; unsigned failed; unsigned flips; unsigned lags; } fault;
static __thread unsigned seed;

static int due(int call)
{
    if (!(fault.calls >> call & 1))
        return 0;
    if (!seed)
        seed = (unsigned)(size_t)&seed;
    if (fault.every > 1 && rand_r(&seed) % fault.every)
        return 0;
    __atomic_add_fetch(&fault.failed, 1, __ATOMIC_RELAXED);
    errno = fault.error;
    return 1;
}

#define REAL(name, result, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(name) \
    int name(int dir, const char *path, int flags, ...) { \
        REAL(#name, int, int, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return due(OPENAT) ? -1 : real(dir, path, flags, mode); }
OPEN(openat) OPEN(openat64)
#define MOVE(id, name, type) \
    ssize_t name(int fd, type parts, int count, off_t at) { \
        REAL(#name, ssize_t, int, type, int, off_t); return due(id) ? -1 : real(fd, parts, count, at); }
static ssize_t flipped(const struct iovec *parts, ssize_t moved)
{
    if (fault.flips && moved > 4096 && !(rand_r(&seed) % fault.flips)) {
        ((unsigned char *)parts->iov_base)[(size_t)rand_r(&seed) % parts->iov_len] ^= 1u << rand_r(&seed) % 8;
        __atomic_add_fetch(&fault.failed, 1, __ATOMIC_RELAXED);
    }
    return moved;
}
#define READ(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t at) { \
        REAL(#name, ssize_t, int, const struct iovec *, int, off_t); \
        return due(PREADV) ? -1 : flipped(parts, real(fd, parts, count, at)); }
READ(preadv) READ(preadv64)
MOVE(PWRITEV, pwritev, const struct iovec *) MOVE(PWRITEV, pwritev64, const struct iovec *)
#define ONE(id, name, type) \
    ssize_t name(int fd, type bytes, size_t count, off_t at) { \
        REAL(#name, ssize_t, int, type, size_t, off_t); return due(id) ? -1 : real(fd, bytes, count, at); }
ONE(PREAD, pread, void *) ONE(PREAD, pread64, void *)
ONE(PWRITE, pwrite, const void *) ONE(PWRITE, pwrite64, const void *)
int renameat(int d, const char *p, int e, const char *q) {
    REAL("renameat", int, int, const char *, int, const char *);
    return due(RENAMEAT) ? -1 : real(d, p, e, q); }
int renameat2(int d, const char *p, int e, const char *q, unsigned f) {
    REAL("renameat2", int, int, const char *, int, const char *, unsigned);
    return due(RENAMEAT) ? -1 : real(d, p, e, q, f); }
int fdatasync(int fd) { REAL("fdatasync", int, int); return due(FDATASYNC) ? -1 : real(fd); }
int fsync(int fd) { REAL("fsync", int, int); return due(FSYNC) ? -1 : real(fd); }
int mkdirat(int d, const char *p, mode_t m) {
    REAL("mkdirat", int, int, const char *, mode_t); return due(MKDIRAT) ? -1 : real(d, p, m); }
int unlinkat(int d, const char *p, int f) {
    REAL("unlinkat", int, int, const char *, int); return due(UNLINKAT) ? -1 : real(d, p, f); }
#define STAT(name, type) \
    int name(int d, const char *p, type *s, int f) { \
        REAL(#name, int, int, const char *, type *, int); \
        int result = due(FSTATAT) ? -1 : real(d, p, s, f); \
        if (!result && fault.lags && S_ISREG(s->st_mode)) s->st_blocks = 1; \
        return result; }
STAT(fstatat, struct stat) STAT(fstatat64, struct stat64)
int utimensat(int d, const char *p, const struct timespec t[2], int f) {
    REAL("utimensat", int, int, const char *, const struct timespec *, int);
    return due(UTIMENSAT) ? -1 : real(d, p, t, f); }
#define LIST(name, type) \
    type *name(DIR *d) { REAL(#name, type *, DIR *); return due(READDIR) ? NULL : real(d); }
LIST(readdir, struct dirent) LIST(readdir64, struct dirent64)
