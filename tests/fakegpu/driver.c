/* CUDA's driver library, as far as torch, Triton and vLLM call it; build.py adds functions that do nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
/* Of the fake runtime, loaded before. */
extern int cudaDeviceGetAttribute(int *value, int attribute, int device);
extern void *fakegpu_reserve(size_t bytes);
extern int fakegpu_back(void *at, size_t bytes);
extern int fakegpu_release(void *at, size_t bytes);
extern int fakegpu_forget(void *at, size_t bytes);

API int cuInit(unsigned flags) { return 0; }
API int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
API int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
API int cuDeviceGetCount(int *count) { return *count = 1, 0; }
API int cuDeviceGetName(char *name, int bytes, int device) { return snprintf(name, bytes, "NVIDIA H100 80GB HBM3 (fake)"), 0; }
API int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 7, 16), 0; }
API int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
API int cuCtxGetCurrent(void **context) { return *context = (void *)0x42, 0; }
API int cuCtxSetCurrent(void *context) { return 0; }
API int cuCtxGetDevice(int *device) { return *device = 0, 0; }
API int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)0x42, 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { return *flags = 0, *is_active = 1, 0; }
API int cuGetErrorString(int error, const char **text) { return *text = "an error of the fake GPU", 0; }
API int cuGetErrorName(int error, const char **text) { return *text = "CUDA_ERROR_FAKE", 0; }
API int cuModuleLoadData(void **module, const void *image) { return *module = (void *)0x55, 0; }
API int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *names, void *values) { return *module = (void *)0x55, 0; }
API int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = strdup(name), 0; }
API int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = attribute == 0 ? 1024 : 0, 0; }
API int cuMemGetAllocationGranularity(size_t *bytes, void *properties, int option) { return *bytes = 2 << 20, 0; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int block, size_t bytes) { return *count = 1, 0; }

/* Memory whose addresses outlive it: vLLM's sleep gives the memory back, and maps other memory at the wake. */
API int cuMemAddressReserve(void **at, size_t bytes, size_t alignment, void *fixed, unsigned long long flags) { return (*at = fakegpu_reserve(bytes)) ? 0 : 2; }
API int cuMemAddressFree(void *at, size_t bytes) { return fakegpu_forget(at, bytes); }
API int cuMemCreate(unsigned long long *handle, size_t bytes, const void *properties, unsigned long long flags) { return *handle = bytes, 0; }
API int cuMemMap(void *at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) { return fakegpu_back(at, bytes); }
API int cuMemUnmap(void *at, size_t bytes) { return fakegpu_release(at, bytes); }

API int cuPointerGetAttribute(void *value, int attribute, uintptr_t at) {
    if (attribute == 2) *(int *)value = 2; /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device */
    else *(uintptr_t *)value = attribute == 3 ? at : 0; /* CU_POINTER_ATTRIBUTE_DEVICE_POINTER */
    return 0;
}

API int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    char second[200];
    snprintf(second, sizeof second, "%s_v2", name);
    void *self = dlopen("libcuda.so.1", RTLD_NOW);
    if (!(*function = dlsym(self, name))) *function = dlsym(self, second);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500; /* CUDA_ERROR_NOT_FOUND */
}
