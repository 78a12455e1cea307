/* A file system that fails, for LD_PRELOAD: calls of one kind on paths under a prefix.
 *
 * FAULTY_PREFIX  paths that begin with it
 * FAULTY_CALL    open, read, mmap, connect (to whatever) or fsync
 * FAULTY_PROGRAM part of the command line of the processes in which it fails; unset: of all
 * FAULTY_ERRNO   with which the call fails; 0: it succeeds, late
 * FAULTY_SLEEP_S how long it takes; -1: until FAULTY_LEFT has 0
 * FAULTY_LEFT    file of two ints, shared by all processes: how many calls are still to fail, and their errno if it is
 *                not 0
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static volatile int *left;
static const char *prefix, *call;
static int failure, seconds;

static int ours(int (*real)(const char *, int, ...)) {
    const char *program = getenv("FAULTY_PROGRAM");
    char line[4096];
    if (!program || !*program) return 1;
    int file = real("/proc/self/cmdline", O_RDONLY);
    ssize_t size = read(file, line, sizeof line - 1);
    close(file);
    for (ssize_t at = 0; at < size; at++)
        if (!line[at]) line[at] = ' ';
    line[size < 0 ? 0 : size] = 0;
    return strstr(line, program) != NULL;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTY_LEFT");
    prefix = getenv("FAULTY_PREFIX");
    call = getenv("FAULTY_CALL");
    if (!path || !prefix || !call) return;
    failure = atoi(getenv("FAULTY_ERRNO"));
    seconds = atoi(getenv("FAULTY_SLEEP_S"));
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = real(path, O_RDWR);
    if (file < 0) return;
    void *page = mmap(NULL, 2 * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED && ours(real)) left = page;
}

/* Whether this call fails; has waited where it is slow. */
static int faulty(const char *name, const char *path) {
    if (!left || strcmp(name, call) || strncmp(path, prefix, strlen(prefix))) return 0;
    if (seconds < 0) {
        while (*left > 0) usleep(10000);
        return 0;
    }
    for (int now = *left; now > 0; now = *left)
        if (__sync_bool_compare_and_swap(left, now, now - 1)) {
            sleep(seconds);
            errno = left[1] ? left[1] : failure;
            return errno != 0;
        }
    return 0;
}

static int faulty_file(const char *name, int file) {
    char link[64], path[4096];
    if (!left || strcmp(name, call)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return faulty(name, path);
}

#define OPEN(name)                                                      \
    int name(const char *path, int flags, ...) {                        \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);  \
        va_list more;                                                   \
        va_start(more, flags);                                          \
        int mode = va_arg(more, int);                                   \
        va_end(more);                                                   \
        return faulty("open", path) ? -1 : real(path, flags, mode);     \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int file, void *to, size_t size) {
    ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    return faulty_file("read", file) ? -1 : real(file, to, size);
}

#define MMAP(name)                                                                              \
    void *name(void *to, size_t size, int protection, int flags, int file, off_t offset) {      \
        void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, #name);          \
        if (file >= 0 && faulty_file("mmap", file)) return MAP_FAILED;                          \
        return real(to, size, protection, flags, file, offset);                                 \
    }
MMAP(mmap)
MMAP(mmap64)

int connect(int file, const struct sockaddr *to, socklen_t size) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    return left && faulty("connect", prefix) ? -1 : real(file, to, size);
}

int fsync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    return faulty_file("fsync", file) ? -1 : real(file);
}
