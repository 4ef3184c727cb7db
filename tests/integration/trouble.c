/* Makes the files of one file system slow, hang, fail, be damaged or go away, for the process that preloads this.

   KVTIER_TEST_TROUBLE names a file of words that a test writes at any time: see faulty_backends.py. A call that
   hangs does so in the kernel, where no signal reaches it: it opens a file below KVTIER_TEST_MUTE. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/fcntl.h> /* not <fcntl.h>, whose open() takes any arguments */
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DEVICE, DELAY_US, HANGS, ERROR, DAMAGES, WORDS };
enum { LONG_BYTES = 64 << 10 };

static volatile uint64_t none[WORDS], *word = none;

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("KVTIER_TEST_TROUBLE");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED)
        word = mapped;
    if (fd >= 0)
        syscall(SYS_close, fd);
}

/* Let a call on a file suffer; return its error. */
static int suffer(int fd, const char *path)
{
    struct stat status;
    if (!word[DEVICE])
        return 0;
    if (syscall(SYS_newfstatat, fd, path, &status, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) &&
        syscall(SYS_newfstatat, fd, "", &status, AT_EMPTY_PATH))
        return 0;
    if (status.st_dev != word[DEVICE])
        return 0;
    if (word[DELAY_US])
        usleep((useconds_t)word[DELAY_US]);
    while (word[HANGS]) {
        const char *mute = getenv("KVTIER_TEST_MUTE");
        int opened = (int)syscall(SYS_openat, AT_FDCWD, mute, O_RDONLY | O_CLOEXEC, 0);
        if (opened >= 0)
            syscall(SYS_close, opened);
        usleep(1000);
    }
    return (int)word[ERROR];
}

static ssize_t damage(ssize_t count, char *bytes)
{
    if (word[DAMAGES] && count >= LONG_BYTES)
        bytes[count / 2 % LONG_BYTES] ^= 0x40;
    return count;
}

#define WRAP(kind, name, parameters, arguments, fd, path, after)                         \
    kind name parameters                                                                 \
    {                                                                                    \
        static kind(*real) parameters;                                                   \
        int error = suffer(fd, path);                                                    \
        if (!real)                                                                       \
            real = (kind(*) parameters)dlsym(RTLD_NEXT, #name);                          \
        if (error) {                                                                     \
            errno = error;                                                               \
            return -1;                                                                   \
        }                                                                                \
        return after(real arguments);                                                    \
    }
#define DAMAGED(call) damage(call, buffer)
#define DAMAGED_VECTOR(call) damage(call, parts[0].iov_base)
#define FIRST_PART(call) (parts[0].iov_len >= LONG_BYTES ? DAMAGED_VECTOR(call) : call)
#define OPEN(name)                                                                                     \
    WRAP(int, name, (const char *path, int flags, mode_t mode), (path, flags, mode), AT_FDCWD, path, )
#define OPENAT(name)                                                                                   \
    WRAP(int, name, (int fd, const char *path, int flags, mode_t mode), (fd, path, flags, mode), fd, path, )
#define READ(name)                                                                                     \
    WRAP(ssize_t, name, (int fd, void *buffer, size_t n, off_t at), (fd, buffer, n, at), fd, "", DAMAGED)
#define WRITE(name)                                                                                    \
    WRAP(ssize_t, name, (int fd, const void *buffer, size_t n, off_t at), (fd, buffer, n, at), fd, "", )
#define READV(name)                                                                                    \
    WRAP(ssize_t, name, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at), fd, "", FIRST_PART)
#define WRITEV(name)                                                                                   \
    WRAP(ssize_t, name, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at), fd, "", )
#define OF_FD(name) WRAP(int, name, (int fd), (fd), fd, "", )
#define OF_PATH(name, type) WRAP(int, name, (const char *path, type value), (path, value), AT_FDCWD, path, )
#define OF_NAME(name, type) WRAP(int, name, (int fd, const char *path, type value), (fd, path, value), fd, path, )
#define OF_NAMES(name, type)                                                                           \
    WRAP(int, name, (int fd, const char *path, int to, const char *new, type flags),                   \
         (fd, path, to, new, flags), fd, path, )
#define STATAT(name, type)                                                                             \
    WRAP(int, name, (int fd, const char *path, type *status, int flags), (fd, path, status, flags), fd, path, )

OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
READ(pread) READ(pread64) WRITE(pwrite) WRITE(pwrite64)
READV(preadv) READV(preadv64) WRITEV(pwritev) WRITEV(pwritev64)
WRAP(ssize_t, read, (int fd, void *buffer, size_t n), (fd, buffer, n), fd, "", DAMAGED)
WRAP(ssize_t, write, (int fd, const void *buffer, size_t n), (fd, buffer, n), fd, "", )
OF_FD(fsync) OF_FD(fdatasync)
OF_PATH(mkdir, mode_t) OF_NAME(mkdirat, mode_t) OF_NAME(unlinkat, int)
OF_PATH(stat, struct stat *) OF_PATH(stat64, struct stat64 *)
STATAT(fstatat, struct stat) STATAT(fstatat64, struct stat64)
OF_NAMES(renameat2, unsigned) OF_NAMES(linkat, int)
WRAP(int, renameat, (int fd, const char *path, int to, const char *new), (fd, path, to, new), fd, path, )
WRAP(int, fstatvfs, (int fd, struct statvfs *status), (fd, status), fd, "", )
WRAP(int, fstatvfs64, (int fd, struct statvfs64 *status), (fd, status), fd, "", )
WRAP(int, ftruncate, (int fd, off_t size), (fd, size), fd, "", )
WRAP(int, ftruncate64, (int fd, off64_t size), (fd, size), fd, "", )
