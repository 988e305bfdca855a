/* The scenario: devices, traces, what goes wrong and when; and the counts of calls. */
#define _GNU_SOURCE
#include "simulator.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_TRACES = 1024, MAX_RULES = 64, MAX_COUNTS = 4096 };
typedef struct { int device; char function[64]; char kind; long from, times, seen, argument; } Rule;
typedef struct { char function[64]; long thread, count; } Count;

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
Device devices[MAX_DEVICES];
static Trace traces[MAX_TRACES];
Sample samples[MAX_SAMPLES];
static Rule rules[MAX_RULES];
static Count counts[MAX_COUNTS];
int num_devices, num_samples, references, gpm_alive;
static int num_traces, num_rules, num_counts, hanging, release_number;

/* ---- the scenario ---- */

static void add_device(char *text) {
    Device *device = &devices[num_devices];
    memset(device, 0, sizeof *device);
    if (num_devices < MAX_DEVICES && sscanf(text, "%95s %31s %u %d %u %95[^\n]", device->uuid, device->pci,
            &device->architecture, &device->parent, &device->gpu_instance, device->name) == 6)
        num_devices++;
}

Trace *find_trace(int device, const char *signal) {
    for (int i = 0; i < num_traces; i++)
        if (traces[i].device == device && !strcmp(traces[i].signal, signal)) return &traces[i];
    return NULL;
}

static void add_trace(char *text) {
    char signal[40], *place = strtok(text, " \n");
    int device = place ? atoi(place) : NO_DEVICE;
    if (!(place = strtok(NULL, " \n")) || num_traces == MAX_TRACES) return;
    snprintf(signal, sizeof signal, "%s", place);
    Trace *trace = find_trace(device, signal);
    if (!trace) trace = &traces[num_traces++];
    free(trace->values);
    *trace = (Trace){.device = device};
    memcpy(trace->signal, signal, sizeof signal);
    while ((place = strtok(NULL, " \n"))) {
        trace->values = realloc(trace->values, (trace->count + 1) * sizeof(double));
        trace->values[trace->count++] = atof(place);
    }
}

static void add_rule(char kind, const char *text) {
    Rule rule = {.kind = kind};
    if (num_rules < MAX_RULES && sscanf(text, "%d %63s %ld %ld %ld", &rule.device, rule.function, &rule.from, &rule.times,
                                        &rule.argument) == 5)
        rules[num_rules++] = rule;
}

static void apply(char *line) {
    char command[16];
    int used = 0;
    if (sscanf(line, "%15s %n", command, &used) != 1) return;
    char *rest = line + used;
    if (!strcmp(command, "device")) add_device(rest);
    else if (!strcmp(command, "trace")) add_trace(rest);
    else if (!strcmp(command, "error")) add_rule('e', rest);
    else if (!strcmp(command, "slow")) add_rule('s', rest);
    else if (!strcmp(command, "hang")) add_rule('h', rest);
    else if (!strcmp(command, "sample")) {
        Sample *sample = &samples[num_samples];
        if (num_samples < MAX_SAMPLES && sscanf(rest, "%d %u %llu %u", &sample->device, &sample->drain,
                                                &sample->time_us, &sample->value) == 4)
            num_samples++;
    } else if (!strcmp(command, "release")) {
        release_number++;
        for (int i = 0; i < num_rules; i++)
            if (rules[i].kind == 'h') rules[i].times = 0;
        pthread_cond_broadcast(&released);
    }
}

void read_scenario(void) {
    for (int i = 0; i < num_traces; i++) free(traces[i].values);
    memset(traces, 0, sizeof traces);
    num_devices = num_traces = num_samples = num_rules = 0;
    const char *path = getenv("NVML_SIM_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    char *line = NULL;
    size_t size = 0;
    while (file && getline(&line, &size, file) > 0) apply(line);
    free(line);
    if (file) fclose(file);
}

/* ---- what tests ask and say ---- */

void sim_command(const char *line) {
    pthread_mutex_lock(&lock);
    char *copy = strdup(line);
    apply(copy);
    free(copy);
    pthread_mutex_unlock(&lock);
}

long sim_calls(const char *function, long thread) {  /* "*": all functions; 0: all threads */
    long sum = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_counts; i++)
        if ((!strcmp(function, "*") || !strcmp(function, counts[i].function)) && (!thread || thread == counts[i].thread))
            sum += counts[i].count;
    pthread_mutex_unlock(&lock);
    return sum;
}

void sim_forget_calls(void) {
    pthread_mutex_lock(&lock);
    num_counts = 0;
    pthread_mutex_unlock(&lock);
}

int sim_references(void) { return references; }
int sim_hanging(void) { return hanging; }
int sim_gpm_samples_alive(void) { return gpm_alive; }

/* ---- the way into every function ---- */

void count_call(const char *function) {
    long thread = syscall(SYS_gettid);
    for (int i = 0; i < num_counts; i++)
        if (counts[i].thread == thread && !strcmp(counts[i].function, function)) { counts[i].count++; return; }
    if (num_counts == MAX_COUNTS) return;
    Count *fresh = &counts[num_counts++];
    snprintf(fresh->function, sizeof fresh->function, "%s", function);
    fresh->thread = thread;
    fresh->count = 1;
}

int follow_rules(int device, const char *function, int wildcard) {
    for (int i = 0; i < num_rules; i++) {
        Rule *rule = &rules[i];
        if (rule->device != NO_DEVICE && rule->device != device) continue;
        if (strcmp(rule->function, function) && !(wildcard && !strcmp(rule->function, "*"))) continue;
        long seen = rule->seen++;
        if (seen < rule->from || (rule->times >= 0 && seen >= rule->from + rule->times)) continue;
        if (rule->kind == 'e') return (int)rule->argument;
        if (rule->kind == 's') {
            struct timespec pause = {rule->argument / 1000, (rule->argument % 1000) * 1000000L};
            pthread_mutex_unlock(&lock);
            nanosleep(&pause, NULL);
            pthread_mutex_lock(&lock);
        } else {
            int number = release_number;
            hanging++;
            while (number == release_number) pthread_cond_wait(&released, &lock);
            hanging--;
        }
    }
    return SUCCESS;
}

int enter(Device *device, const char *function) {
    pthread_mutex_lock(&lock);
    count_call(function);
    if (!references) return UNINITIALIZED;
    return follow_rules(device ? (int)(device - devices) : NO_DEVICE, function, 1);
}

int leave(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

int reading(Device *device, const char *signal, double *value) {
    Trace *trace = find_trace((int)(device - devices), signal);
    if (!trace || !trace->count) return NOT_SUPPORTED;
    *value = trace->values[trace->cursor < trace->count ? trace->cursor : trace->count - 1];
    trace->cursor++;
    return SUCCESS;
}

int has_gpm(int device) {
    for (int i = 0; i < num_traces; i++)
        if (traces[i].device == device && !strncmp(traces[i].signal, "gpm.", 4)) return 1;
    return 0;
}
