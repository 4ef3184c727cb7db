/* CUDA's runtime library over host memory: the functions that torch, vLLM and kvtier call.

build.py adds the others, which do nothing and return success. A kernel that is launched here does not run: kernels.py
computes. KVTIER_FAKE_TRACE=1 names each one that came here all the same. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "streams.h"

#define API __attribute__((visibility("default")))
#define NAME "NVIDIA H100 80GB HBM3 (fake)"
static const size_t TOTAL = 79ull << 30;
/* A type of memory: addresses that have none now. */
static const enum cudaMemoryType GONE = (enum cudaMemoryType)99;

/* --- the capture of a graph: one at a time. kernels.py records its kernels, and launches them --- */

static struct { void *stream; pid_t thread; enum cudaStreamCaptureMode mode; unsigned long long number; int is_broken; } capture;
static __thread enum cudaStreamCaptureMode mode; /* of calls in this thread; 0: cudaStreamCaptureModeGlobal */

/* Return whether this thread may not make a call that is "potentially unsafe" while a graph is captured: see
   cudaThreadExchangeStreamCaptureMode in CUDA's reference. Such a call breaks the capture. */
static int is_prohibited(void) {
    if (!capture.stream || mode == cudaStreamCaptureModeRelaxed) return 0;
    int is_own = capture.thread == gettid(), is_global = capture.mode == cudaStreamCaptureModeGlobal;
    if (is_own ? capture.mode == cudaStreamCaptureModeRelaxed : !is_global || mode != cudaStreamCaptureModeGlobal) return 0;
    return capture.is_broken = 1;
}

#define UNSAFE if (is_prohibited()) return cudaErrorStreamCaptureUnsupported

/* --- memory --- */

typedef struct { char *at; size_t bytes; enum cudaMemoryType type; } Memory;
static Memory memories[1 << 16];
static int memory_count;
static size_t device_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(void *at, size_t bytes, enum cudaMemoryType type) {
    pthread_mutex_lock(&lock);
    memories[memory_count++] = (Memory){at, bytes, type};
    if (type == cudaMemoryTypeDevice) device_bytes += bytes;
    pthread_mutex_unlock(&lock);
}

static Memory take(void *at) {
    Memory found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < memory_count && !found.at; i++)
        if (memories[i].at == at) {
            found = memories[i];
            memories[i] = memories[--memory_count];
        }
    if (found.type == cudaMemoryTypeDevice) device_bytes -= found.bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Return the memory of an address; ``at`` is NULL if there is none. */
static Memory memory_at(const void *at) {
    Memory found = {.type = cudaMemoryTypeUnregistered};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < memory_count; i++)
        if ((char *)at >= memories[i].at && (char *)at < memories[i].at + memories[i].bytes) found = memories[i];
    pthread_mutex_unlock(&lock);
    return found;
}

static enum cudaMemoryType type_of(const void *at) { return memory_at(at).type; }

/* CUDA refuses a copy of two pieces that were pinned one by one. */
static int is_one_piece(const void *at, size_t n) { return memory_at(at).at == memory_at((const char *)at + n - 1).at; }

static cudaError_t map(void **at, size_t bytes, enum cudaMemoryType type) {
    UNSAFE;
    bytes = (bytes + 4095) & ~4095ull;
    if (type == cudaMemoryTypeDevice && device_bytes + bytes > TOTAL) return cudaErrorMemoryAllocation;
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*at == MAP_FAILED) return cudaErrorMemoryAllocation;
    add(*at, bytes, type);
    return cudaSuccess;
}

static cudaError_t unmap(void *at) {
    UNSAFE;
    if (!at) return cudaSuccess;
    device_synchronize();
    Memory it = take(at);
    if (it.at) munmap(it.at, it.bytes);
    return it.at ? cudaSuccess : cudaErrorInvalidValue;
}

/* For the driver: addresses without memory; memory for them, with nothing useful in it; and none again. */
API void *fakegpu_reserve(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

API int fakegpu_back(void *at, size_t bytes) {
    if (mprotect(at, bytes, PROT_READ | PROT_WRITE)) return cudaErrorMemoryAllocation;
    take(at);
    add(memset(at, 0xff, bytes), bytes, cudaMemoryTypeDevice);
    return cudaSuccess;
}

API int fakegpu_release(void *at, size_t bytes) {
    if (!take(at).at) return cudaErrorInvalidValue;
    add(at, bytes, GONE);
    lose_memory(at, bytes);
    madvise(at, bytes, MADV_DONTNEED);
    return mprotect(at, bytes, PROT_NONE);
}

API int fakegpu_forget(void *at, size_t bytes) {
    take(at); /* other memory may get these addresses */
    return munmap(at, bytes);
}

API cudaError_t cudaMalloc(void **p, size_t n) { return map(p, n, cudaMemoryTypeDevice); }
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return map(p, n, cudaMemoryTypeHost); }
API cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
API cudaError_t cudaFree(void *p) { return unmap(p); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return unmap(p); }
API cudaError_t cudaFreeHost(void *p) { return unmap(p); }

API cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) {
    UNSAFE;
    if (memory_at(p).at || !is_one_piece(p, n)) return cudaErrorHostMemoryAlreadyRegistered;
    add(p, n, cudaMemoryTypeHost);
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *p) {
    UNSAFE;
    Memory it = take(p);
    if (!it.at) return cudaErrorHostMemoryNotRegistered;
    if (!is_in_use(it.at, it.bytes)) return cudaSuccess;
    fprintf(stderr, "fake GPU: memory was unpinned while a copy that touches it is pending\n");
    abort();
}

API cudaError_t cudaHostGetDevicePointer(void **device, void *p, unsigned flags) {
    *device = p;
    return type_of(p) == cudaMemoryTypeUnregistered ? cudaErrorInvalidValue : cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    enum cudaMemoryType type = type_of(p);
    int is_known = type != cudaMemoryTypeUnregistered, is_device = type == cudaMemoryTypeDevice;
    *a = (struct cudaPointerAttributes){.type = type, .device = is_known ? 0 : -2};
    a->devicePointer = is_known ? (void *)p : NULL;
    a->hostPointer = is_device ? NULL : (void *)p;
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = TOTAL;
    *free_bytes = TOTAL - device_bytes - (600ull << 20);
    return cudaSuccess;
}

/* --- copies --- */

static cudaError_t copy(void *dst, const void *src, size_t n, Stream *stream, int is_ordered) {
    if (n && !(is_one_piece(dst, n) && is_one_piece(src, n))) return cudaErrorInvalidValue;
    enum cudaMemoryType to = type_of(dst), from = type_of(src);
    int is_pageable = to == cudaMemoryTypeUnregistered || from == cudaMemoryTypeUnregistered;
    if (to == GONE || from == GONE) break_device();
    else if (n) enqueue_copy(stream, dst, src, n, is_pageable, is_ordered);
    return device_error();
}

API cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    return copy(dst, src, n, stream_of(s), 1);
}

API cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind) {
    UNSAFE;
    cudaMemcpyAsync(dst, src, n, kind, NULL);
    stream_synchronize(stream_of(NULL));
    return cudaSuccess;
}

API cudaError_t cudaMemcpyPeerAsync(void *dst, int to, const void *src, int from, size_t n, cudaStream_t s) {
    return cudaMemcpyAsync(dst, src, n, cudaMemcpyDefault, s);
}

API cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    for (size_t i = 0; i < height; i++)
        cudaMemcpyAsync((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width, kind, s);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyBatchAsync(void *const *dst, const void *const *src, const size_t *bytes, size_t count,
                                     struct cudaMemcpyAttributes *attributes, size_t *firsts, size_t kinds,
                                     cudaStream_t s) {
    if (!s || kinds != 1 || firsts[0]) return cudaErrorInvalidValue; /* the default stream is not allowed */
    enum cudaMemcpySrcAccessOrder access = attributes->srcAccessOrder;
    cudaError_t error = access == cudaMemcpySrcAccessOrderInvalid ? cudaErrorInvalidValue : cudaSuccess;
    for (size_t i = 0; i < count && !error; i++)
        error = bytes[i] ? copy(dst[i], src[i], bytes[i], stream_of(s), access == cudaMemcpySrcAccessOrderStream) : cudaErrorInvalidValue;
    return error;
}

API cudaError_t cudaMemsetAsync(void *dst, int value, size_t n, cudaStream_t s) {
    if (n) enqueue_fill(stream_of(s), dst, value, n);
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *dst, int value, size_t n) { return cudaMemsetAsync(dst, value, n, NULL); }

/* --- streams and events --- */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    *s = (cudaStream_t)stream_new();
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }

API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    UNSAFE;
    stream_synchronize(stream_of(s));
    return device_error();
}

API cudaError_t cudaDeviceSynchronize(void) {
    UNSAFE;
    device_synchronize();
    return device_error();
}

API cudaError_t cudaStreamQuery(cudaStream_t s) {
    UNSAFE;
    return stream_query(stream_of(s)) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    enqueue_wait(stream_of(s), (Event *)e);
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *argument) {
    stream_synchronize(stream_of(s));
    function(argument);
    return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void *argument, unsigned flags) {
    stream_synchronize(stream_of(s));
    function(s, cudaSuccess, argument);
    return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    *e = (cudaEvent_t)event_new(); /* never freed: work that is pending may record it */
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }

API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    enqueue_record(stream_of(s), (Event *)e);
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }

API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    UNSAFE;
    event_synchronize((Event *)e);
    return device_error();
}

API cudaError_t cudaEventQuery(cudaEvent_t e) {
    UNSAFE;
    return event_query((Event *)e) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!event_is_done((Event *)from) || !event_is_done((Event *)to)) return cudaErrorNotReady;
    *ms = event_ms((Event *)to) - event_ms((Event *)from);
    return cudaSuccess;
}

/* --- graphs --- */

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode given) {
    if (capture.stream || (uintptr_t)s <= 2) return cudaErrorStreamCaptureUnsupported; /* nor the default stream */
    capture.mode = given, capture.thread = gettid(), capture.is_broken = 0, capture.number++;
    capture.stream = s;
    return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    *graph = NULL;
    if (capture.stream != s) return cudaErrorIllegalState;
    capture.stream = NULL;
    if (capture.is_broken) return cudaErrorStreamCaptureInvalidated;
    *graph = (cudaGraph_t)(uintptr_t)capture.number;
    return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { return *count = 1, cudaSuccess; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) { return *exec = (cudaGraphExec_t)graph, cudaSuccess; }

API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = !s || s != capture.stream ? cudaStreamCaptureStatusNone
              : capture.is_broken       ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                         const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = capture.number;
    return cudaStreamIsCapturing(s, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *exchanged) {
    enum cudaStreamCaptureMode before = mode;
    mode = *exchanged;
    *exchanged = before;
    return cudaSuccess;
}

/* --- the device: an H100 --- */

API cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
API cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { return *pool = (cudaMemPool_t)0x77, cudaSuccess; }

API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(unsigned long long *)value = 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    snprintf(text, bytes, "0000:01:00.0");
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    *p = (struct cudaDeviceProp){
        .name = NAME, .totalGlobalMem = TOTAL, .sharedMemPerBlock = 49152, .regsPerBlock = 65536, .warpSize = 32,
        .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
        .totalConstMem = 65536, .major = 9, .minor = 0, .textureAlignment = 512, .multiProcessorCount = 132,
        .canMapHostMemory = 1, .concurrentKernels = 1, .pciBusID = 1, .asyncEngineCount = 3, .unifiedAddressing = 1,
        .memoryBusWidth = 5120, .l2CacheSize = 50 << 20, .maxThreadsPerMultiProcessor = 2048,
        .streamPrioritiesSupported = 1, .sharedMemPerMultiprocessor = 233472, .regsPerMultiprocessor = 65536,
        .managedMemory = 1, .cooperativeLaunch = 1, .sharedMemPerBlockOptin = 232448, .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1, .maxBlocksPerMultiProcessor = 32, .reservedSharedMemPerBlock = 1024,
    };
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static const int values[] = {
        [cudaDevAttrMaxThreadsPerBlock] = 1024, [cudaDevAttrMaxBlockDimX] = 1024, [cudaDevAttrMaxBlockDimY] = 1024,
        [cudaDevAttrMaxBlockDimZ] = 64, [cudaDevAttrMaxGridDimX] = 2147483647, [cudaDevAttrMaxGridDimY] = 65535,
        [cudaDevAttrMaxGridDimZ] = 65535, [cudaDevAttrMaxSharedMemoryPerBlock] = 49152,
        [cudaDevAttrTotalConstantMemory] = 65536, [cudaDevAttrWarpSize] = 32, [cudaDevAttrMaxRegistersPerBlock] = 65536,
        [cudaDevAttrClockRate] = 1980000, [cudaDevAttrMultiProcessorCount] = 132, [cudaDevAttrCanMapHostMemory] = 1,
        [cudaDevAttrConcurrentKernels] = 1, [cudaDevAttrMemoryClockRate] = 1, [cudaDevAttrUnifiedAddressing] = 1,
        [cudaDevAttrL2CacheSize] = 50 << 20, [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048,
        [cudaDevAttrComputeCapabilityMajor] = 9, [cudaDevAttrStreamPrioritiesSupported] = 1,
        [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = 233472, [cudaDevAttrMaxRegistersPerMultiprocessor] = 65536,
        [cudaDevAttrManagedMemory] = 1, [cudaDevAttrMaxSharedMemoryPerBlockOptin] = 232448,
        [cudaDevAttrMaxBlocksPerMultiprocessor] = 32, [cudaDevAttrReservedSharedMemoryPerBlock] = 1024,
        [cudaDevAttrMemoryPoolsSupported] = 1,
    };
    *value = (size_t)attribute < sizeof values / sizeof *values ? values[attribute] : 0;
    return cudaSuccess;
}

API const char *cudaGetErrorString(cudaError_t error) { return error ? "an error of the fake GPU" : "no error"; }
API const char *cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorFake" : "cudaSuccess"; }

/* --- kernels: none runs here --- */

typedef struct { const void *function; const char *name; } Kernel;
static Kernel kernels[1 << 16];
static int kernel_count;

API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

API void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit, void *a,
                                void *b, void *c, void *d, int *e) {
    if (kernel_count < 1 << 16) kernels[kernel_count++] = (Kernel){function, name};
}

static cudaError_t launched(const void *function) {
    const char *name = "?";
    for (int i = 0; i < kernel_count; i++)
        if (kernels[i].function == function) name = kernels[i].name;
    if (getenv("KVTIER_FAKE_TRACE")) fprintf(stderr, "fake GPU: kernel %s does not run\n", name);
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s) { return launched(f); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s) { return launched((void *)f); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **a) { return launched(f); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s) { return launched(f); }
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { return *kernel = (cudaKernel_t)f, cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { return *p = (void *)symbol, cudaSuccess; }

static __thread struct { dim3 grid, block; size_t bytes; void *stream; } call;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, struct CUstream_st *stream) {
    call.grid = grid, call.block = block, call.bytes = bytes, call.stream = stream;
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *stream) {
    *grid = call.grid, *block = call.block, *bytes = call.bytes, *(void **)stream = call.stream;
    return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90,
                                     .maxDynamicSharedSizeBytes = 232448};
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int block, size_t bytes) { return *count = 1, cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int block, size_t bytes, unsigned flags) { return *count = 1, cudaSuccess; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    int status = 1;
    *function = NULL;
    int (*find)(const char *, void **, int, unsigned long long, int *) = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), "cuGetProcAddress_v2");
    if (find) find(name, function, version, flags, &status);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
