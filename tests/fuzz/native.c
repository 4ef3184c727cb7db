/* libFuzzer targets for the C code that reads what others may have written. Built with -DTARGET=<name> by
 * `nox -s fuzz`; inputs as in tests/fuzz/parsers.py.
 */
#include "kvtier_native.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int64_t kvt_files_get(const struct call *call, size_t first, size_t end);
int64_t kvt_chunks_list(int root_fd, const char *folder, const uint32_t *stop, uint64_t *out, uint64_t room);

enum { CHUNK = BLOCK_BYTES, KEY = MAX_KEY_BYTES, TRAILER = SEAL_BYTES };

static int root_fd;
static char root[] = "/tmp/kvtier-fuzz-XXXXXX";
static const uint32_t never = 0;

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void leave(void)
{
    int64_t kvt_tree_remove(int fd, const char *path, const uint32_t *stop, int64_t sums[3]);
    int64_t sums[3] = {0};
    kvt_tree_remove(AT_FDCWD, root, &never, sums);
}

/* The bytes of a chunk's file, whose trailer's own checksum the first byte may make right; see chunk_file(). */
static void chunk_file(const uint8_t *data, size_t size)
{
    static _Alignas(BLOCK_BYTES) uint8_t file[CHUNK + BLOCK_BYTES], slot[CHUNK], payload[CHUNK];
    static const uint8_t digest[DIGEST_BYTES] = "digest";
    uint8_t key[KEY], *trailer = file + CHUNK;
    uint32_t key_ends[2] = {0, KEY};
    int64_t place = 0;
    int32_t result = -1;
    uint64_t inode = 0;
    for (size_t i = 0; i < CHUNK; i++)
        payload[i] = (uint8_t)i;
    memset(key, 'a', KEY);
    memset(file, 0, sizeof file);
    memcpy(file, payload, CHUNK);
    kvt_seal(trailer, key, KEY, kvt_crc32c(0, payload, CHUNK), CHUNK, digest);
    /* What is given is laid over what is sound, for it to be close to that. */
    for (size_t i = 1; i < size && i <= TRAILER; i++)
        trailer[i - 1] ^= data[i];
    for (size_t i = TRAILER + 1; i < size && i - TRAILER - 1 < CHUNK; i++)
        file[i - TRAILER - 1] ^= data[i];
    if (size && data[0] & 1)
        put_number(trailer + SEAL_OWN_CHECKSUM, kvt_crc32c(0, trailer, SEAL_OWN_CHECKSUM), 4);
    size_t length = size && data[0] & 2 ? size * 37 % sizeof file : sizeof file;
    int fd = openat(root_fd, "chunk", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    require(write(fd, file, length) == (ssize_t)length);
    close(fd);
    struct call call = {.data_dir = "data", .tmp_dir = "tmp", .keys = key, .key_ends = key_ends, .slots = &place,
                        .stop = &never, .results = &result, .inodes = &inode, .base = (uint64_t)(uintptr_t)slot,
                        .chunk_bytes = CHUNK, .root_fd = root_fd};
    memcpy(call.digest, digest, sizeof digest);
    char path[512] = "data/616/16_g1633771873/";
    for (int i = 0; i < KEY - GROUP_BYTES; i++)
        strcat(path, "61");
    require(renameat(root_fd, "chunk", root_fd, strcat(path, ".bin")) == 0);
    kvt_files_get(&call, 0, 1);
    require(result >= RESULT_OK && result <= RESULT_CHECKSUM && result != RESULT_EXISTS && result != RESULT_ABSENT);
    require(result != RESULT_OK || memcmp(slot, payload, CHUNK) == 0);
}

/* The names of a directory and of a file in it, with a slash between them. */
static void names(const uint8_t *data, size_t size)
{
    char leaf[256] = "hhh/", file[600];
    const uint8_t *slash = memchr(data, '/', size);
    if (slash == NULL || memchr(data, 0, size) || size > 240 || memchr(slash + 1, '/', size - (size_t)(slash + 1 - data)))
        return;
    memcpy(leaf + 4, data, (size_t)(slash - data));
    if (data + size == slash + 1 || slash[1] == '.' || leaf[4] == '\0' || leaf[4] == '.')
        return;
    snprintf(file, sizeof file, "%s/%.*s", leaf, (int)(size - (size_t)(slash + 1 - data)), (const char *)slash + 1);
    require(mkdirat(root_fd, leaf, 0700) == 0);
    int fd = openat(root_fd, file, O_WRONLY | O_CREAT, 0600);
    require(fd >= 0);
    close(fd);
    uint64_t fingerprint = 0;
    int64_t count = kvt_chunks_list(root_fd, "hhh", &never, &fingerprint, 1);
    require(count == 0 || count == 1);
    unlinkat(root_fd, file, 0);
    unlinkat(root_fd, leaf, AT_REMOVEDIR);
}

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    (void)count, (void)arguments, (void)chunk_file, (void)names;
    require(mkdtemp(root) != NULL && (root_fd = open(root, O_RDONLY | O_DIRECTORY)) >= 0);
    atexit(leave);
    require(!mkdirat(root_fd, "data", 0700) && !mkdirat(root_fd, "data/616", 0700) && !mkdirat(root_fd, "hhh", 0700) &&
            !mkdirat(root_fd, "data/616/16_g1633771873", 0700));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    TARGET(data, size);
    return 0;
}
