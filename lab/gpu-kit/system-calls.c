/* Counts the system calls of a process: `system-calls PROCESS SECONDS`. Prints a line for each call that was made: its
 * number in the kernel's table (of x86-64) and the count. Traces the threads that the process has at the start and the
 * threads that they start. When this program ends, the kernel lets them go on. A call that is interrupted at the start
 * is made again, and counts. Ends with 1 if the machine does not allow tracing. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned long counts[1024];

static void end(int signal) { (void)signal; }

int main(int count, char **words) {
    char path[64];
    struct dirent *entry;
    struct sigaction action;
    int traced = 0;
    if (count != 3) return 2;
    snprintf(path, sizeof path, "/proc/%ld/task", strtol(words[1], 0, 10));
    DIR *threads = opendir(path);
    while (threads && (entry = readdir(threads))) {
        long thread = strtol(entry->d_name, 0, 10);
        if (thread <= 0 || ptrace(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE)) continue;
        ptrace(PTRACE_INTERRUPT, thread, 0, 0);
        traced++;
    }
    if (!traced) {
        fprintf(stderr, "cannot trace process %s: %s\n", words[1], strerror(errno));
        return 1;
    }
    memset(&action, 0, sizeof action);
    action.sa_handler = end; /* Without SA_RESTART the signal ends waitpid. */
    sigaction(SIGALRM, &action, 0);
    /* The timer repeats, because the first signal may come while waitpid is not running. */
    struct itimerval timer = {{0, 100000}, {strtol(words[2], 0, 10), 0}};
    setitimer(ITIMER_REAL, &timer, 0);
    for (;;) {
        int status;
        struct user_regs_struct registers;
        pid_t thread = waitpid(-1, &status, __WALL);
        if (thread < 0) break;
        if (!WIFSTOPPED(status)) continue;
        int stop = WSTOPSIG(status), delivered = 0;
        if (stop == (SIGTRAP | 0x80)) {
            /* The result is -ENOSYS until the call is made, so that only its entry counts. */
            if (!ptrace(PTRACE_GETREGS, thread, 0, &registers) && (long)registers.rax == -ENOSYS)
                counts[registers.orig_rax & 1023]++;
        } else if (!(status >> 16)) {
            delivered = stop;
        }
        ptrace(PTRACE_SYSCALL, thread, 0, delivered);
    }
    for (int call = 0; call < 1024; call++)
        if (counts[call]) printf("%d\t%lu\n", call, counts[call]);
    return 0;
}
