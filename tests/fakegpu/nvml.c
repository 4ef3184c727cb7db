/* NVIDIA's management library: one H100. */
#include <stdio.h>

#define API __attribute__((visibility("default")))
typedef struct { unsigned long long total, free, used; } Memory;

API int nvmlInit_v2(void) { return 0; }
API int nvmlInitWithFlags(int flags) { return 0; }
API int nvmlShutdown(void) { return 0; }
API int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return *device = (void *)1, 0; }
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return *device = (void *)1, 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return *device = (void *)1, 0; }
API int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = 0, 0; }
API int nvmlDeviceGetName(void *device, char *name, unsigned bytes) { return snprintf(name, bytes, "NVIDIA H100 80GB HBM3"), 0; }
API int nvmlDeviceGetUUID(void *device, char *uuid, unsigned bytes) { return snprintf(uuid, bytes, "GPU-00000000-0000-0000-0000-000000000001"), 0; }
API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { return *major = 9, *minor = 0, 0; }
API int nvmlDeviceGetMemoryInfo(void *device, Memory *it) { return it->total = 79ull << 30, it->used = 600 << 20, it->free = it->total - it->used, 0; }
API int nvmlDeviceGetNumaNodeId(void *device, unsigned *node) { return 3; /* not supported */ }
API int nvmlSystemGetDriverVersion(char *version, unsigned bytes) { return snprintf(version, bytes, "580.00"), 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
API const char *nvmlErrorString(int error) { return "an error of the fake GPU"; }
API int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status) { return *status = 0, 0; }
API int nvmlDeviceGetCpuAffinity(void *device, unsigned count, unsigned long *set) { return set[0] = 3, 0; }
