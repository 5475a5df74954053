// Preloaded into arm64 programs that run by qemu's user mode: an arm64 program that they start, themselves included
// (/proc/self/exe), starts by qemu too. binfmt_misc would do the same, but belongs to the machine. Anything else is
// started as it is. Programs named without a slash are the machine's own.
//
// EXEC_BY_QEMU names qemu, QEMU_LD_PREFIX the root file system with the libraries. Children get both, whatever their
// environment is.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_WORDS 4096

// What is started in a program's place.
struct start {
  const char *program;
  char path[PATH_MAX];
  char *words[MOST_WORDS];
};

static int is_arm64(const char *path) {
  Elf64_Ehdr header;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, &header, sizeof header);
  close(file);
  return length == sizeof header && memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_machine == EM_AARCH64;
}

// `NAME=value` for the children of children, and the value.
struct variable {
  char text[PATH_MAX + 32];
  const char *value;
};
static struct variable preload, qemu, prefix;

static void keep(struct variable *variable, const char *name, const char *value) {
  if (!value || strlen(value) >= PATH_MAX) return;
  strcpy(variable->text, name);
  strcat(variable->text, "=");
  variable->value = variable->text + strlen(variable->text);
  strcat(variable->text, value);
}

__attribute__((constructor)) static void begin(void) {
  keep(&preload, "LD_PRELOAD", getenv("LD_PRELOAD"));
  keep(&qemu, "EXEC_BY_QEMU", getenv("EXEC_BY_QEMU"));
  keep(&prefix, "QEMU_LD_PREFIX", getenv("QEMU_LD_PREFIX"));
  // The machine's own programs cannot load this.
  unsetenv("LD_PRELOAD");
}

// Fills in the start; the program's own words where qemu has no part in it.
static char *const *plan(struct start *start, const char *path, char *const words[]) {
  start->program = path;
  if (!preload.value || !qemu.value || !prefix.value) return words;
  if (!strchr(path, '/') || !is_arm64(path) || !realpath(path, start->path)) return words;
  char *before[] = {(char *)qemu.value, "-E", preload.text, "-E", qemu.text, "-E", prefix.text,
                    "-L", (char *)prefix.value, "-0", words[0], start->path};
  size_t first = sizeof before / sizeof *before, count = 0;
  while (words[count]) count++;
  if (count == 0 || count + first > MOST_WORDS) return words;
  memcpy(start->words, before, sizeof before);
  memcpy(start->words + first, words + 1, count * sizeof *words);
  start->program = qemu.value;
  return start->words;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int execve(const char *path, char *const words[], char *const environment[]) {
  struct start start;
  char *const *planned = plan(&start, path, words);
  return NEXT(execve)(start.program, planned, environment);
}

int execvp(const char *path, char *const words[]) {
  struct start start;
  char *const *planned = plan(&start, path, words);
  return NEXT(execvp)(start.program, planned);
}

int posix_spawnp(pid_t *child, const char *path, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, char *const words[], char *const environment[]) {
  struct start start;
  char *const *planned = plan(&start, path, words);
  return NEXT(posix_spawnp)(child, start.program, actions, attributes, planned, environment);
}
