/* Faults on purpose on the first GPU, through CUDA's driver API. `fault mmu` writes to an address that is not mapped
 * (XID 31), `fault misaligned` to an address that is not a multiple of four (XID 13). Both are an application's
 * faults: the driver ends this process's context, and the GPU stays as it is. Ends with 0 if the GPU refused the
 * write, and with 2 without a driver. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long address;

static const char PTX[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry fault(.param .u64 at) {\n"
    "  .reg .u64 %a; .reg .u32 %v;\n"
    "  ld.param.u64 %a, [at]; mov.u32 %v, 7; st.global.u32 [%a], %v; ret;\n}\n";

static void *library;

static int call(const char *name, void *a, void *b, void *c) {
    int (*function)(void *, void *, void *) = (int (*)(void *, void *, void *))dlsym(library, name);
    int code = function ? function(a, b, c) : -1;
    printf("%s: %d\n", name, code);
    return code;
}

int main(int count, char **words) {
    void *context, *module, *function;
    address at = 0x10;
    int is_misaligned = count > 1 && !strcmp(words[1], "misaligned");
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("no driver: %s\n", dlerror());
        return 2;
    }
    if (call("cuInit", 0, 0, 0) || call("cuCtxCreate_v2", &context, 0, 0)) return 2;
    if (call("cuModuleLoadData", &module, (void *)PTX, 0)) return 1;
    if (call("cuModuleGetFunction", &function, module, "fault")) return 1;
    if (is_misaligned) {
        if (call("cuMemAlloc_v2", &at, (void *)64, 0)) return 1;
        at += 1;
    }
    typedef int launch_kernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                              void **, void **);
    launch_kernel *launch = (launch_kernel *)dlsym(library, "cuLaunchKernel");
    void *arguments[] = {&at};
    if (!launch) return 1;
    printf("cuLaunchKernel: %d\n", launch(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0));
    return call("cuCtxSynchronize", 0, 0, 0) ? 0 : 1;
}
