/* What the scenario keeps, and the way into every NVML function. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       VERSION_MISMATCH = 25 };
enum { MAX_DEVICES = 32, MAX_SAMPLES = 4096, NO_DEVICE = -1 };

typedef struct {
    char uuid[96], pci[32], name[96];
    unsigned architecture, gpu_instance;
    int parent;
    unsigned gpm_samples, drains;
} Device;
typedef struct { int device; char signal[40]; double *values; unsigned count, cursor; } Trace;
typedef struct { int device; unsigned drain; unsigned long long time_us; unsigned value; } Sample;

#define HIDDEN __attribute__((visibility("hidden")))
extern HIDDEN pthread_mutex_t lock;
extern HIDDEN Device devices[MAX_DEVICES];
extern HIDDEN Sample samples[MAX_SAMPLES];
extern HIDDEN int num_devices, num_samples, references, gpm_alive;

HIDDEN void read_scenario(void);
HIDDEN Trace *find_trace(int device, const char *signal);
HIDDEN int has_gpm(int device);
HIDDEN void count_call(const char *function);
HIDDEN int follow_rules(int device, const char *function, int wildcard);
HIDDEN int enter(Device *device, const char *function);  /* takes the lock; the caller gives it back with leave() */
HIDDEN int leave(int result);
HIDDEN int reading(Device *device, const char *signal, double *value);
