/* What of CUDA a session calls when it is made, on the host's memory: enough for a graph to be loaded, optimised and given
 * to providers. Kernels that are launched do nothing: answers are worth nothing. The device has 80 GB and capability 9.0;
 * where its properties have which field is CUDA 12's and 13's. */
#include <stdlib.h>
#include <string.h>

#define MEMORY ((size_t)80 << 30)

static int made(void** handle, size_t bytes) {
  *handle = calloc(1, bytes ? bytes : 1);
  return *handle == NULL;
}

int cudaMalloc(void** at, size_t bytes) { return made(at, bytes); }
int cudaMallocAsync(void** at, size_t bytes, void* stream) { return made(at, bytes); }
int cudaMallocHost(void** at, size_t bytes) { return made(at, bytes); }
int cudaHostAlloc(void** at, size_t bytes, unsigned flags) { return made(at, bytes); }
int cudaFree(void* at) { free(at); return 0; }
int cudaFreeAsync(void* at, void* stream) { free(at); return 0; }
int cudaFreeHost(void* at) { free(at); return 0; }
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) { memcpy(to, from, bytes); return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) { memcpy(to, from, bytes); return 0; }
int cudaMemset(void* at, int value, size_t bytes) { memset(at, value, bytes); return 0; }
int cudaMemsetAsync(void* at, int value, size_t bytes, void* stream) { memset(at, value, bytes); return 0; }
int cudaMemGetInfo(size_t* left, size_t* all) { *left = *all = MEMORY; return 0; }

int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1024; /* 75, 76: compute capability */
  return 0;
}

static int properties(char* of) {
  memset(of, 0, 700);
  strcpy(of, "a stand-in");
  *(size_t*)(of + 288) = MEMORY;
  *(size_t*)(of + 296) = 48 << 10; /* shared memory of a block */
  *(int*)(of + 304) = 64 << 10;    /* registers of a block */
  *(int*)(of + 308) = 32;          /* threads of a warp */
  *(int*)(of + 320) = 1024;        /* threads of a block */
  *(int*)(of + 360) = 9;           /* compute capability */
  return 0;
}
int cudaGetDeviceProperties(void* of, int device) { return properties(of); }
int cudaGetDeviceProperties_v2(void* of, int device) { return properties(of); }

int cudaStreamCreate(void** stream) { return made(stream, 64); }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return made(stream, 64); }
int cudaEventCreateWithFlags(void** event, unsigned flags) { return made(event, 64); }
int cublasCreate_v2(void** handle) { return made(handle, 64); }
int cublasLtCreate(void** handle) { return made(handle, 64); }
int cudnnCreate(void** handle) { return made(handle, 64); }
size_t cudnnGetVersion(void) { return 91000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudaGetErrorString(int error) { return "a stand-in's error"; }
const char* cudaGetErrorName(int error) { return "a stand-in's error"; }
const char* cudnnGetErrorString(int error) { return "a stand-in's error"; }
