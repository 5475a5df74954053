#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static unsigned long long target;
static char node[256];
int cuInit(unsigned flags) {
    int count = 0;
    if (getenv("FAKE_CUDA_DEVICE")) return flags || !strcpy(node, getenv("FAKE_CUDA_DEVICE"));
    for (char gpu = '0'; gpu < '8'; gpu++) {
        char path[] = {"/dev/nvidia_"};
        path[sizeof path - 2] = gpu;
        if (!access(path, F_OK) && strcpy(node, path)) count++;
    }
    return flags || count != 1 ? 100 : 0;
}
int cuCtxCreate_v2(void **context, unsigned flags, int device) { *context = 0; return flags || device ? 101 : 0; }
int cuModuleLoadData(void **module, const char *text) { *module = 0; return strstr(text, ".entry fault") ? 0 : 218; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return strcmp(name, "fault") ? 500 : 0;
}
int cuMemAlloc_v2(unsigned long long *at, size_t size) { *at = 0x7f0000000000; return size ? 0 : 1; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    (void)function, (void)stream, (void)extra;
    target = *(unsigned long long *)arguments[0];
    return gx * gy * gz * bx * by * bz == 1 && !shared ? 0 : 1;
}
int cuCtxSynchronize(void) {
    char answer[8] = "";
    int file = open(node, O_RDWR);
    if (file < 0) return 0;
    dprintf(file, "%d\n", target & 3 ? 13 : 31);
    for (int turn = 0; turn < 1500 && strncmp(answer, "ok", 2); turn++) {
        usleep(20000);
        if (pread(file, answer, sizeof answer, 0) < 0) return 0;
    }
    return strncmp(answer, "ok", 2) ? 0 : target & 3 ? 716 : 700;
}
