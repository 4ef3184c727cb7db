/* The native library of kvtier: whole jobs of many chunks in one foreign call.
 *
 * Python takes the interpreter lock again after each foreign call, and beside a busy engine thread
 * each time costs up to a switch interval (5 ms). So a call does the work of a whole job: checksums,
 * file I/O and renames, copies. It is loaded with ctypes, which releases the lock, and it needs
 * nothing but libc. Where it is missing, kvtier/_native/__init__.py copies in Python, and there is no
 * file tier.
 */
#include "kvtier_native.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Raised with every change of a signature or a structure: a library left over from another version
 * of the source is then not used. */
#define KVT_ABI 15

uint32_t kvt_abi(void) { return KVT_ABI; }

/* ---------------------------------------------------------------------------------- copies */

/* Copy n ranges; source and destination must not overlap. Sizes are bytes. */
void kvt_copy_batch(const uint64_t *src, const uint64_t *dst, const uint64_t *sizes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        memcpy((void *)(uintptr_t)dst[i], (const void *)(uintptr_t)src[i], (size_t)sizes[i]);
}

/* The shape of CUDA's cudaMemcpyAsync(dst, src, count, kind, stream), and of its ROCm twin. */
typedef int copy_async(void *, const void *, size_t, int, void *);
#define COPY_EITHER_WAY 4 /* cudaMemcpyDefault: the direction is told from the addresses */

/* Events of an accelerator around copies: these wait for the event `after`, and `start` and `end` are recorded.
 * The functions have the shapes of cudaStreamWaitEvent and cudaEventRecord. */
struct around {
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*record)(void *event, void *stream);
    void *after, *start, *end;
};

static int record_start(const struct around *around, void *stream)
{
    int code = around ? around->wait(stream, around->after, 0) : 0;
    return code || !around ? code : around->record(around->start, stream);
}

static int record_end(const struct around *around, void *stream)
{
    return around ? around->record(around->end, stream) : 0;
}

/* Give n copies to an accelerator's stream, with events `around` them unless that is NULL. Stops at the first
 * call that is refused and returns its error code, or 0. What was given before it is under way. */
int kvt_copy_batch_async(copy_async *copy, const uint64_t *src, const uint64_t *dst, const uint64_t *sizes,
                         size_t n, void *stream, const struct around *around)
{
    int code = record_start(around, stream);
    for (size_t i = 0; i < n && !code; i++)
        code = copy((void *)(uintptr_t)dst[i], (const void *)(uintptr_t)src[i], (size_t)sizes[i],
                    COPY_EITHER_WAY, stream);
    return code ? code : record_end(around, stream);
}

/* The shapes of cudaMemcpyBatchAsync: in CUDA 12 with an index of the copy that failed, from 13 on without. */
typedef int copy_many_telling(void **, void **, size_t *, size_t, void *, size_t *, size_t, size_t *, void *);
typedef int copy_many(void **, void **, size_t *, size_t, void *, size_t *, size_t, void *);

/* The same, with at most `most` copies in each call of `copy`, which has the first shape above if
 * `tells_failed`. */
int kvt_copy_groups_async(void *copy, int tells_failed, void *attributes, uint64_t *src, uint64_t *dst,
                          uint64_t *sizes, size_t n, size_t most, void *stream, const struct around *around)
{
    size_t first = 0, failed;
    int code = record_start(around, stream);
    for (size_t at = 0; at < n && !code; at += most) {
        void **to = (void **)(dst + at), **from = (void **)(src + at);
        size_t *bytes = (size_t *)(sizes + at), count = n - at < most ? n - at : most;
        code = tells_failed ? ((copy_many_telling *)copy)(to, from, bytes, count, attributes, &first, 1, &failed,
                                                          stream)
                            : ((copy_many *)copy)(to, from, bytes, count, attributes, &first, 1, stream);
    }
    return code ? code : record_end(around, stream);
}

/* Give every page of the range memory of its own, without changing a byte. Returns 0 or errno.
 * A file-backed range must have its space allocated before: where the kernel is too old to do this
 * itself (before 5.14) pages are touched, and a touch that finds no space kills the process. */
int kvt_populate(void *address, size_t length)
{
    if (madvise(address, length, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return errno;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if ((uintptr_t)address % page != 0)
        return EINVAL;
    /* An atomic "or" with nothing: writes the page, and loses no concurrent write to it. */
    for (size_t at = 0; at < length; at += page)
        __atomic_fetch_or((uint8_t *)address + at, 0, __ATOMIC_RELAXED);
    return 0;
}

/* --------------------------------------------------------------------------------- checksums */

/* CRC-32C (Castagnoli), reflected, as in the iSCSI standard and the crc32c package. */
#define CRC_POLYNOMIAL 0x82f63b78u
#define LANE_LONG 4096
#define LANE_SHORT 256

static uint32_t byte_table[8][256];

/* A CRC after which a fixed number of zero bytes follows is a linear map of its 32 bits: four
 * tables, one for each of its bytes. They join lanes that are computed side by side. */
struct zeros {
    uint32_t table[4][256];
};
static struct zeros zeros_long, zeros_short;

static uint32_t after_zeros(const struct zeros *zeros, uint32_t crc)
{
    return zeros->table[0][crc & 0xff] ^ zeros->table[1][(crc >> 8) & 0xff] ^
           zeros->table[2][(crc >> 16) & 0xff] ^ zeros->table[3][crc >> 24];
}

static void fill_zeros(struct zeros *zeros, size_t count)
{
    uint32_t image[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = UINT32_C(1) << bit;
        for (size_t i = 0; i < count; i++)
            crc = (crc >> 8) ^ byte_table[0][crc & 0xff];
        image[bit] = crc;
    }
    for (int part = 0; part < 4; part++)
        for (unsigned value = 0; value < 256; value++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1)
                    crc ^= image[8 * part + bit];
            zeros->table[part][value] = crc;
        }
}

static uint64_t load_u64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t crc_portable(uint32_t crc, const uint8_t *at, size_t length)
{
    for (; length >= 8; at += 8, length -= 8) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
        crc = byte_table[7][low & 0xff] ^ byte_table[6][(low >> 8) & 0xff] ^
              byte_table[5][(low >> 16) & 0xff] ^ byte_table[4][low >> 24] ^
              byte_table[3][at[4]] ^ byte_table[2][at[5]] ^ byte_table[1][at[6]] ^ byte_table[0][at[7]];
    }
    for (; length; at++, length--)
        crc = (crc >> 8) ^ byte_table[0][(crc ^ *at) & 0xff];
    return crc;
}

/* The instruction takes one step a cycle and gives its result three cycles later: three lanes keep
 * it busy. The same code for both architectures; the compiler inlines it into each. */
#define CRC_WITH_INSTRUCTION(NAME, TARGET, STEP64, STEP8)                                          \
    TARGET static uint32_t NAME##_lanes(uint32_t crc, const uint8_t *at, size_t lane,              \
                                        const struct zeros *zeros)                                 \
    {                                                                                              \
        uint64_t a = crc, b = 0, c = 0;                                                            \
        for (const uint8_t *end = at + lane; at < end; at += 8) {                                  \
            a = STEP64(a, load_u64(at));                                                           \
            b = STEP64(b, load_u64(at + lane));                                                    \
            c = STEP64(c, load_u64(at + 2 * lane));                                                \
        }                                                                                          \
        return after_zeros(zeros, after_zeros(zeros, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;    \
    }                                                                                              \
    TARGET static uint32_t NAME(uint32_t crc, const uint8_t *at, size_t length)                    \
    {                                                                                              \
        for (; length >= 3 * LANE_LONG; at += 3 * LANE_LONG, length -= 3 * LANE_LONG)              \
            crc = NAME##_lanes(crc, at, LANE_LONG, &zeros_long);                                   \
        for (; length >= 3 * LANE_SHORT; at += 3 * LANE_SHORT, length -= 3 * LANE_SHORT)           \
            crc = NAME##_lanes(crc, at, LANE_SHORT, &zeros_short);                                 \
        for (; length >= 8; at += 8, length -= 8)                                                  \
            crc = (uint32_t)STEP64(crc, load_u64(at));                                             \
        for (; length; at++, length--)                                                             \
            crc = STEP8(crc, *at);                                                                 \
        return crc;                                                                                \
    }

#if defined(__x86_64__)
#if defined(__clang__) && __clang_major__ >= 14 /* to which the instruction is a feature of its own */
#define CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define CRC_TARGET __attribute__((target("sse4.2")))
#endif
CRC_WITH_INSTRUCTION(crc_instruction, CRC_TARGET, _mm_crc32_u64, _mm_crc32_u8)
static bool has_instruction(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__) && defined(__linux__)
CRC_WITH_INSTRUCTION(crc_instruction, __attribute__((target("+crc"))), __crc32cd, __crc32cb)
static bool has_instruction(void) { return (getauxval(AT_HWCAP) & (1 << 7)) != 0; } /* HWCAP_CRC32 */
#else
#define crc_instruction crc_portable
static bool has_instruction(void) { return false; }
#endif

static uint32_t (*crc_update)(uint32_t, const uint8_t *, size_t) = crc_portable;

__attribute__((constructor)) static void prepare_crc(void)
{
    for (unsigned value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ CRC_POLYNOMIAL : crc >> 1;
        byte_table[0][value] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (unsigned value = 0; value < 256; value++)
            byte_table[k][value] = (byte_table[k - 1][value] >> 8) ^ byte_table[0][byte_table[k - 1][value] & 0xff];
    fill_zeros(&zeros_long, LANE_LONG);
    fill_zeros(&zeros_short, LANE_SHORT);
    if (has_instruction())
        crc_update = crc_instruction;
}

uint32_t kvt_crc32c(uint32_t value, const void *data, size_t length)
{
    return ~crc_update(~value, data, length);
}

/* The same without the processor's instruction: for tests of both. */
uint32_t kvt_crc32c_portable(uint32_t value, const void *data, size_t length)
{
    return ~crc_portable(~value, data, length);
}

/* -------------------------------------------------------------------------------------- seals */

static const uint8_t magic[MAGIC_BYTES] = {'K', 'V', 'T', 'I', 'E', 'R', 0, 1};

void kvt_seal(uint8_t *trailer, const uint8_t *key, size_t key_bytes, uint32_t checksum, uint64_t length,
              const uint8_t *digest)
{
    memset(trailer, 0, SEAL_BYTES);
    memcpy(trailer + SEAL_MAGIC, magic, sizeof magic);
    put_number(trailer + SEAL_VERSION, FORMAT_VERSION, 2);
    put_number(trailer + SEAL_KEY_BYTES, key_bytes, 2);
    put_number(trailer + SEAL_CHECKSUM, checksum, 4);
    put_number(trailer + SEAL_PAYLOAD_BYTES, length, 8);
    memcpy(trailer + SEAL_DIGEST, digest, DIGEST_BYTES);
    memcpy(trailer + SEAL_KEY, key, key_bytes);
    put_number(trailer + SEAL_OWN_CHECKSUM, kvt_crc32c(0, trailer, SEAL_OWN_CHECKSUM), 4);
}

bool kvt_is_sealed(const uint8_t *trailer)
{
    return get_number(trailer + SEAL_OWN_CHECKSUM, 4) == kvt_crc32c(0, trailer, SEAL_OWN_CHECKSUM) &&
           memcmp(trailer + SEAL_MAGIC, magic, sizeof magic) == 0 &&
           get_number(trailer + SEAL_VERSION, 2) == FORMAT_VERSION &&
           get_number(trailer + SEAL_KEY_BYTES, 2) <= MAX_KEY_BYTES;
}

/* -------------------------------------------------------------------------------- chunk files */

#define PATH_BYTES 1024
#define PUBLISH_ATTEMPTS 3

struct chunk {
    const uint8_t *key;
    size_t key_bytes;
    char *slot;
    char path[PATH_BYTES];
};

/* <data_dir>/<hhh>/<hh>_g<group>/<hash_hex>.bin; a hash of fewer than five digits is filled up with
 * zeros in the names of directories. */
static int name_chunk(const struct call *call, size_t i, struct chunk *chunk)
{
    chunk->key = call->keys + call->key_ends[i];
    chunk->key_bytes = call->key_ends[i + 1] - call->key_ends[i];
    if (chunk->key_bytes <= GROUP_BYTES || chunk->key_bytes > MAX_KEY_BYTES)
        return -EINVAL;
    size_t hash_bytes = chunk->key_bytes - GROUP_BYTES;
    char hex[2 * MAX_KEY_BYTES + 1] = {0}, head[] = "00000";
    for (size_t k = 0; k < hash_bytes; k++) {
        hex[2 * k] = "0123456789abcdef"[chunk->key[k] >> 4];
        hex[2 * k + 1] = "0123456789abcdef"[chunk->key[k] & 15];
    }
    memcpy(head, hex, 2 * hash_bytes < 5 ? 2 * hash_bytes : 5);
    const uint8_t *group = chunk->key + hash_bytes;
    uint32_t index = (uint32_t)group[0] << 24 | (uint32_t)group[1] << 16 | (uint32_t)group[2] << 8 | group[3];
    int length = snprintf(chunk->path, sizeof chunk->path, "%s/%.3s/%.2s_g%u/%s.bin", call->data_dir, head,
                          head + 3, index, hex);
    if (length < 0 || (size_t)length >= sizeof chunk->path)
        return -ENAMETOOLONG;
    if (call->slots != NULL)
        chunk->slot = (char *)(uintptr_t)(call->base + (uint64_t)call->slots[i] * call->chunk_bytes);
    return 0;
}

static int make_directory(int root_fd, const char *path, bool shared)
{
    int failed = mkdirat(root_fd, path, 0700);
    if (!failed && shared && fchmodat(root_fd, path, S_ISGID | 0770, 0)) {
        /* A file system without modes: who may read the folder is set where it is mounted. */
    }
    return failed;
}

int kvt_make_parents(int root_fd, char *path, bool shared)
{
    char *slash = strrchr(path, '/');
    if (slash == NULL)
        return 0;
    *slash = '\0';
    int made = 0, failed = make_directory(root_fd, path, shared);
    if (failed && errno == ENOENT) {
        made = kvt_make_parents(root_fd, path, shared);
        if (made >= 0)
            failed = make_directory(root_fd, path, shared);
    }
    int error = failed && errno != EEXIST ? -errno : 0;
    *slash = '/';
    if (made < 0)
        return made;
    return error ? error : made + (failed ? 0 : 1);
}

int kvt_sync_parents(int root_fd, char *path, int made)
{
    char *slash = strrchr(path, '/');
    if (slash == NULL)
        return 0;
    *slash = '\0';
    int error = 0, fd = openat(root_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd))
        error = -errno;
    if (fd >= 0)
        close(fd);
    if (!error && made > 0)
        error = kvt_sync_parents(root_fd, path, made - 1);
    *slash = '/';
    return error;
}

static size_t file_bytes(const struct call *call) { return call->chunk_bytes + BLOCK_BYTES; }

/* Move the slot and the trailer's block between memory and the file. Returns the bytes moved before
 * the end of the file, or -errno. */
static int64_t transfer(const struct call *call, int fd, char *slot, uint8_t *block, bool writing)
{
    size_t chunk_bytes = call->chunk_bytes, total = file_bytes(call), done = 0;
    while (done < total) {
        struct iovec parts[2];
        int count = 0;
        if (done < chunk_bytes)
            parts[count++] = (struct iovec){slot + done, chunk_bytes - done};
        size_t in_block = done > chunk_bytes ? done - chunk_bytes : 0;
        parts[count++] = (struct iovec){block + in_block, BLOCK_BYTES - in_block};
        ssize_t moved = writing ? pwritev(fd, parts, count, (off_t)done) : preadv(fd, parts, count, (off_t)done);
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

static int direct_flag(const struct call *call) { return call->flags & FLAG_DIRECT ? O_DIRECT : 0; }

/* Write a whole file under its temporary name. Returns 0 or -errno, and leaves nothing when it fails. */
static int write_temporary(const struct call *call, const struct chunk *chunk, char *tmp, uint8_t *block)
{
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | direct_flag(call);
    int fd = openat(call->root_fd, tmp, flags, 0600);
    if (fd < 0 && errno == ENOENT && kvt_make_parents(call->root_fd, tmp, call->flags & FLAG_SHARED) >= 0)
        fd = openat(call->root_fd, tmp, flags, 0600);
    if (fd < 0)
        return -errno;
    int64_t moved = transfer(call, fd, chunk->slot, block, true);
    int error = moved < 0 ? (int)moved : 0;
    if (!error && call->flags & FLAG_SHARED && fchmod(fd, 0660))
        error = -errno;
    if (!error && call->flags & FLAG_SYNC_DATA && fdatasync(fd))
        error = -errno;
    if (close(fd) && !error)
        error = -errno;
    if (error)
        unlinkat(call->root_fd, tmp, 0);
    return error;
}

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif
/* Older C libraries than the ones that kvtier is built with have none. */
extern int renameat2(int, const char *, int, const char *, unsigned) __attribute__((weak));

/* Rename a file to a name that none has: EEXIST where the file system can tell. */
static int rename_new(int root_fd, const char *from, const char *to)
{
    int failed = renameat2 ? renameat2(root_fd, from, root_fd, to, RENAME_NOREPLACE) : (errno = ENOSYS, -1);
    return failed && errno != EEXIST && errno != ENOENT ? renameat(root_fd, from, root_fd, to) : failed;
}

/* Give a whole temporary file its name, unless another writer was faster (EEXIST): its bytes would count twice.
 * Directories are made when they are found missing, so that another process may remove them at any time. Adds those
 * made to `made`. Returns 0 or -errno. */
static int publish(const struct call *call, char *tmp, struct chunk *chunk, int *made)
{
    for (int attempt = 0;; attempt++) {
        if (rename_new(call->root_fd, tmp, chunk->path) == 0)
            break;
        int error = -errno;
        if (error == -ENOENT && attempt < PUBLISH_ATTEMPTS) {
            int more = kvt_make_parents(call->root_fd, chunk->path, call->flags & FLAG_SHARED);
            error = more < 0 ? more : 0;
            *made += more < 0 ? 0 : more;
        }
        if (error) {
            unlinkat(call->root_fd, tmp, 0);
            return error;
        }
    }
    int error = call->flags & FLAG_SYNC_DIRECTORY ? kvt_sync_parents(call->root_fd, chunk->path, *made) : 0;
    if (error) /* or the next put would find it, and call it durable */
        unlinkat(call->root_fd, chunk->path, 0);
    return error;
}

/* Return what the directory of a new file takes on disk. Many file systems keep small ones in their inodes, and
 * what is added here has to be what eviction finds when it removes an empty one. */
static int64_t directory_bytes(const struct call *call, char *path)
{
    struct stat found;
    char *end = strrchr(path, '/');
    *end = '\0';
    int64_t bytes = fstatat(call->root_fd, path, &found, AT_SYMLINK_NOFOLLOW) ? BLOCK_BYTES : found.st_blocks * 512;
    *end = '/';
    return bytes;
}

/* Return whether the chunk is there already: its length is looked at and nothing else. */
static int existing(const struct call *call, size_t i, const struct chunk *chunk)
{
    struct stat found;
    if (fstatat(call->root_fd, chunk->path, &found, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT || errno == ENOTDIR ? RESULT_ABSENT : -errno;
    if (S_ISREG(found.st_mode) && (uint64_t)found.st_size == file_bytes(call))
        return RESULT_EXISTS;
    call->inodes[i] = found.st_ino;
    return RESULT_TORN;
}

static int put_chunk(const struct call *call, size_t i, uint8_t *block, int64_t *added)
{
    struct chunk chunk;
    int result = name_chunk(call, i, &chunk);
    if (result)
        return result;
    result = existing(call, i, &chunk);
    if (result != RESULT_ABSENT)
        return result;
    char tmp[PATH_BYTES];
    int length = snprintf(tmp, sizeof tmp, "%s/%llx", call->tmp_dir, (unsigned long long)(call->serial + i));
    if (length < 0 || (size_t)length >= sizeof tmp)
        return -ENAMETOOLONG;
    kvt_seal(block, chunk.key, chunk.key_bytes, kvt_crc32c(0, chunk.slot, call->chunk_bytes), call->chunk_bytes,
             call->digest);
    result = write_temporary(call, &chunk, tmp, block);
    if (result)
        return result;
    int made = 0;
    result = publish(call, tmp, &chunk, &made);
    *added += (result ? 0 : (int64_t)file_bytes(call)) + (made ? made * directory_bytes(call, chunk.path) : 0);
    return result == -EEXIST ? existing(call, i, &chunk) : result;
}

/* Put a run of chunks. Returns the bytes that the file system has got more, directories included. */
int64_t kvt_files_put(const struct call *call, size_t first, size_t end)
{
    _Alignas(BLOCK_BYTES) uint8_t block[BLOCK_BYTES];
    int64_t added = 0;
    memset(block, 0, sizeof block);
    for (size_t i = first; i < end; i++)
        call->results[i] = stopped(call->stop) ? -ECANCELED : put_chunk(call, i, block, &added);
    return added;
}

static int check(const struct call *call, const struct chunk *chunk, const uint8_t *trailer)
{
    if (!kvt_is_sealed(trailer))
        return RESULT_TORN;
    if (get_number(trailer + SEAL_KEY_BYTES, 2) != chunk->key_bytes ||
        memcmp(trailer + SEAL_KEY, chunk->key, chunk->key_bytes) ||
        memcmp(trailer + SEAL_DIGEST, call->digest, DIGEST_BYTES) ||
        get_number(trailer + SEAL_PAYLOAD_BYTES, 8) != call->chunk_bytes)
        return RESULT_FOREIGN;
    uint32_t checksum = kvt_crc32c(0, chunk->slot, call->chunk_bytes);
    return checksum == get_number(trailer + SEAL_CHECKSUM, 4) ? RESULT_OK : RESULT_CHECKSUM;
}

/* Open a chunk's file so that reading it does not count as a use: kvt_files_touch says which are. Returns -errno. */
static int open_chunk(const struct call *call, const char *path, int flags)
{
    int fd = openat(call->root_fd, path, O_RDONLY | CAREFULLY | O_NOATIME | flags);
    if (fd < 0 && errno == EPERM) /* for the owner only */
        fd = openat(call->root_fd, path, O_RDONLY | CAREFULLY | flags);
    return fd < 0 ? -errno : fd;
}

static int get_chunk(const struct call *call, size_t i, uint8_t *block)
{
    struct chunk chunk;
    int result = name_chunk(call, i, &chunk);
    if (result)
        return result;
    int fd = open_chunk(call, chunk.path, direct_flag(call));
    if (fd < 0)
        return fd == -ENOENT || fd == -ENOTDIR ? RESULT_ABSENT : fd;
    int64_t moved = transfer(call, fd, chunk.slot, block, false);
    if (moved < 0)
        result = (int)moved;
    else if ((uint64_t)moved < file_bytes(call))
        result = RESULT_TORN;
    else
        result = check(call, &chunk, block);
    struct stat found;
    if (result > 0 && fstat(fd, &found) == 0)
        call->inodes[i] = found.st_ino;
    close(fd);
    return result;
}

/* Get a run of chunks into their slots, each proven by its trailer. Returns 0. */
int64_t kvt_files_get(const struct call *call, size_t first, size_t end)
{
    _Alignas(BLOCK_BYTES) uint8_t block[BLOCK_BYTES];
    for (size_t i = first; i < end; i++)
        call->results[i] = stopped(call->stop) ? -ECANCELED : get_chunk(call, i, block);
    return 0;
}

/* Ask for a run of chunks whether their files are there, and as long as they should be. Returns 0. */
int64_t kvt_files_contains(const struct call *call, size_t first, size_t end)
{
    struct chunk chunk;
    for (size_t i = first; i < end; i++) {
        int result = stopped(call->stop) ? -ECANCELED : name_chunk(call, i, &chunk);
        call->results[i] = result ? result : existing(call, i, &chunk);
    }
    return 0;
}

/* Remove a run of chunks. Returns the bytes that the file system has got less. */
int64_t kvt_files_discard(const struct call *call, size_t first, size_t end)
{
    struct chunk chunk;
    int64_t removed = 0;
    for (size_t i = first; i < end; i++) {
        int result = stopped(call->stop) ? -ECANCELED : name_chunk(call, i, &chunk);
        if (!result && unlinkat(call->root_fd, chunk.path, 0))
            result = errno == ENOENT || errno == ENOTDIR ? RESULT_ABSENT : -errno;
        else if (!result)
            removed += (int64_t)file_bytes(call);
        call->results[i] = result;
    }
    return removed;
}

/* Note in a file's mode that it was used often. Where that fails it counts as used twice. */
static void note_class(int fd, int class)
{
    static const mode_t bits[] = {0, 0, S_ISVTX, S_IXUSR, S_ISVTX | S_IXUSR};
    struct stat found;
    if (class > 1 && class <= 4 && !fstat(fd, &found) && kvt_class_of_mode(found.st_mode) < class)
        fchmod(fd, (found.st_mode & (mode_t)(0777 & ~S_IXUSR)) | bits[class]);
}

static int touch_chunk(const struct call *call, const char *path, int class)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
    int fd = open_chunk(call, path, 0);
    if (fd < 0)
        return fd;
    note_class(fd, class);
    int result = futimens(fd, times) ? -errno : 0;
    if (result == -EPERM) /* another user's file: to it a use is as good as new */
        result = futimens(fd, NULL) ? -errno : 0;
    close(fd);
    return result;
}

/* Set the time of the last use of a run of chunks to now, and their class to what is in the results, or leave a
 * higher one. The time when they were written stays. */
void kvt_files_touch(const struct call *call, size_t first, size_t end)
{
    struct chunk chunk;
    for (size_t i = first; i < end; i++) {
        int result = stopped(call->stop) ? -ECANCELED : name_chunk(call, i, &chunk);
        if (!result)
            result = touch_chunk(call, chunk.path, call->results[i]);
        call->results[i] = result == -ENOENT || result == -ENOTDIR ? RESULT_ABSENT : result;
    }
}

/* ------------------------------------------------------------------------------------- trees */

#define MAX_DEPTH 16

/* Mirrored in layouts.py. */
struct tree_sums {
    int64_t bytes;
    int64_t failed; /* what cannot be looked at, directories that cannot be read, and what cannot be removed */
    int64_t error;  /* errno of the first of them, those of _FOREIGN in maintenance.py last */
};

static int walk(int parent_fd, const char *name, bool removing, const uint32_t *stop, int depth,
                struct tree_sums *sums);

static void note_failure(int error, struct tree_sums *sums)
{
    if (error == ENOENT || error == ECANCELED) /* others may be removing the same */
        return;
    sums->failed++;
    if (sums->error == 0 || sums->error == EACCES || sums->error == EPERM || sums->error == ENOTCONN)
        sums->error = error;
}

/* Returns -errno if the process or the machine has no descriptor or memory left: the sum would be far too low. */
static int walk_entry(int fd, const char *name, dev_t device, bool removing, const uint32_t *stop, int depth,
                      struct tree_sums *sums)
{
    struct stat found;
    if (fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW)) {
        note_failure(errno, sums);
        return 0;
    }
    if (found.st_dev != device)
        return 0;
    int flags = 0;
    if (S_ISDIR(found.st_mode) && depth < MAX_DEPTH) {
        int error = walk(fd, name, removing, stop, depth + 1, sums);
        if (error == -EMFILE || error == -ENFILE || error == -ENOMEM)
            return error;
        if (error)
            note_failure(-error, sums);
        flags = AT_REMOVEDIR;
    }
    /* Others may be removing the same: who has removed it counts it, and nobody else. */
    if (!removing || unlinkat(fd, name, flags) == 0)
        sums->bytes += kvt_disk_bytes(&found);
    else if (!flags || errno != ENOTEMPTY) /* what is in it was counted */
        note_failure(errno, sums);
    return 0;
}

/* Add up, or remove, what is in a directory. What vanishes meanwhile is no error. Returns 0 or -errno. */
static int walk(int parent_fd, const char *name, bool removing, const uint32_t *stop, int depth,
                struct tree_sums *sums)
{
    struct stat here;
    DIR *entries = kvt_open_folder(parent_fd, name, &here);
    if (entries == NULL)
        return -errno;
    int error = 0, end = 0;
    for (struct dirent *entry; !error && !stopped(stop) && (entry = kvt_next(entries, &end)) != NULL;)
        if (!kvt_is_dot(entry->d_name))
            error = walk_entry(dirfd(entries), entry->d_name, here.st_dev, removing, stop, depth, sums);
    closedir(entries);
    return stopped(stop) ? -ECANCELED : error ? error : -end;
}

/* Add up what is below a directory of this file system. Returns 0 or -errno. */
int64_t kvt_tree_bytes(int root_fd, const char *path, const uint32_t *stop, struct tree_sums *sums)
{
    return walk(root_fd, path, false, stop, 0, sums);
}

/* Remove a directory and all below it, and add up what was removed. Returns 0 or -errno. */
int64_t kvt_tree_remove(int root_fd, const char *path, const uint32_t *stop, struct tree_sums *sums)
{
    int error = walk(root_fd, path, true, stop, 0, sums);
    if (!error && unlinkat(root_fd, path, AT_REMOVEDIR) && errno != ENOENT)
        error = -errno;
    return error;
}

/* See kvtier/_native/layouts.py. */
size_t kvt_layout_call(uint32_t *out, size_t room)
{
    static const uint32_t table[] = {
        sizeof(struct call),
        FIELD(call, data_dir), FIELD(call, tmp_dir), FIELD(call, keys),
        FIELD(call, key_ends), FIELD(call, slots), FIELD(call, stop),
        FIELD(call, results), FIELD(call, inodes), FIELD(call, base),
        FIELD(call, chunk_bytes), FIELD(call, serial), FIELD(call, root_fd),
        FIELD(call, flags), FIELD(call, digest), FIELD(call, index),
    };
    return kvt_layout(table, sizeof table / sizeof table[0], out, room);
}

size_t kvt_layout_tree_sums(uint32_t *out, size_t room)
{
    static const uint32_t table[] = {
        sizeof(struct tree_sums),
        FIELD(tree_sums, bytes), FIELD(tree_sums, failed), FIELD(tree_sums, error),
    };
    return kvt_layout(table, sizeof table / sizeof table[0], out, room);
}
