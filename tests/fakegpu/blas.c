/* The functions of cuBLAS and cuBLASLt whose answer matters; build.py adds the others. kernels multiply. */
#define API __attribute__((visibility("default")))
API int cublasCreate_v2(void **handle) { return *handle = (void *)0x66, 0; }
API int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
API int cublasLtCreate(void **handle) { return *handle = (void *)0x66, 0; }

API int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, void *found, int *count) {
    return *count = 1, 0;
}
