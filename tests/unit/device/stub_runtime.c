/* A device runtime over host memory. The tests replace "cuda" by the prefix of another one. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct stream *cudaStream_t;
struct attributes { int order, source[2], destination[2]; unsigned flags; };
_Thread_local int last_error, capture_mode;
void *registered, *unregistered, *used_stream, *awaited;
size_t registered_bytes;
unsigned flags;
int fails, calls, version = 12090, failed_index_given, device_offset, events;

static int end(int code) { calls++; if (code) last_error = code; return code; }
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "invalid argument"; }
int cudaGetLastError(void) { int code = last_error; last_error = 0; return code; }
int peek_error(void) { return last_error; }
int peek_mode(void) { return capture_mode; }
int cudaRuntimeGetVersion(int *value) { *value = version; return 0; }
int cudaDriverGetVersion(int *value) { *value = version + 10; return 0; }
/* An event that is over when it is recorded. */
struct event { double at_ms; };
int cudaEventCreateWithFlags(struct event **made, unsigned given)
{
    *made = calloc(1, sizeof **made);
    events++;
    return given == 1 ? 0 : end(1);
}
int cudaEventRecord(struct event *event, cudaStream_t stream)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    event->at_ms = 1e3 * now.tv_sec + now.tv_nsec / 1e6;
    return fails == 3 || stream == NULL ? end(1) : 0;
}
int cudaEventSynchronize(struct event *event) { return event->at_ms > 0 ? 0 : end(1); }
int cudaEventQuery(struct event *event) { return event->at_ms > 0 ? 0 : 600; }
int cudaEventElapsedTime(float *ms, struct event *from, struct event *to)
{
    *ms = (float)(to->at_ms - from->at_ms);
    return 0;
}
int cudaStreamWaitEvent(cudaStream_t stream, void *event, unsigned given)
{
    awaited = event;
    return given || stream == NULL ? end(1) : 0;
}
int cudaMemcpyAsync(void *dst, const void *src, size_t count, int kind, cudaStream_t stream)
{
    if (fails == 1 || kind != 4)
        return end(1);
    used_stream = stream;
    memcpy(dst, src, count);
    return end(0);
}
static int batch(void **dsts, void **srcs, size_t *sizes, size_t count, struct attributes *attributes,
                 size_t *first, size_t kinds, cudaStream_t stream)
{
    struct attributes *it = attributes;
    int hints = it->source[0] || it->source[1] || it->destination[0] || it->destination[1];
    if (fails == 1 || kinds != 1 || *first != 0 || it->order != 1 || it->flags || hints)
        return end(1);
    used_stream = stream;
    for (size_t i = 0; i < count; i++)
        memcpy(dsts[i], srcs[i], sizes[i]);
    return end(0);
}
/* As in CUDA 13; in CUDA 12 there is one argument more, before the last. */
int cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t count, struct attributes *attributes,
                         size_t *first, size_t kinds, void *stream_or_failed, cudaStream_t stream)
{
    failed_index_given = version < 13000;
    if (failed_index_given)
        *(size_t *)stream_or_failed = 77;
    return batch(dsts, srcs, sizes, count, attributes, first, kinds,
                 failed_index_given ? stream : (cudaStream_t)stream_or_failed);
}
int cudaHostRegister(void *ptr, size_t size, unsigned given)
{
    registered = ptr, registered_bytes = size, flags = given;
    return end(fails ? 2 : 0);
}
int cudaHostGetDevicePointer(void **found, void *address, unsigned given)
{
    *found = (char *)address + device_offset;
    return end(given ? 1 : 0);
}
int cudaHostUnregister(void *ptr) { unregistered = ptr; return end(fails ? 1 : 0); }
int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}
