/* A stand-in for libnvidia-ml.so.1: NVML's ABI over a scenario, for tests without a GPU.
 *
 * The scenario is a text file named in NVML_SIM_SCENARIO, read whenever NVML is initialised from a count of 0. Each line
 * is a command, and the same commands may be given to sim_command() in mid-run; <device> is the position of the device's
 * line in the scenario, -1 stands for any:
 *
 *   device <uuid> <pci bus id> <architecture> <parent device or -1> <gpu instance> <name ...>
 *   trace <device> <signal> <value> ...        the k-th reading gives the k-th value, the last one stays
 *   sample <device> <drain> <time_us> <value>  an entry of the utilization buffer, there from the n-th drain on
 *   error <device> <function or *> <from call> <times or -1> <nvmlReturn>
 *   slow  <device> <function or *> <from call> <times or -1> <milliseconds>
 *   hang  <device> <function or *> <from call> <times or -1> 0       until sim_command("release")
 *
 * A signal without a trace is not supported by that device. "gpm.<id>" counts by windows between samples, and
 * "error <device> gpm.<id> ..." sets that metric's own nvmlReturn. Calls are counted for each function and each thread.
 */
#include "simulator.h"

#define MEMORY_V2 0x02000028u
typedef struct { int device; unsigned number; } GpmSample;

static int read_unsigned(Device *device, const char *function, const char *signal, unsigned *out) {
    double value = 0;
    int result = enter(device, function);
    if (!result) result = reading(device, signal, &value);
    if (!result) *out = (unsigned)value;
    return leave(result);
}

static int copy_text(Device *device, const char *function, const char *text, char *out, unsigned size) {
    int result = enter(device, function);
    if (!result && strlen(text) >= size) result = INSUFFICIENT_SIZE;
    if (!result) strcpy(out, text);
    return leave(result);
}

/* ---- library and devices ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    count_call("nvmlInitWithFlags");
    if (!references) read_scenario();
    int result = follow_rules(NO_DEVICE, "nvmlInitWithFlags", 0);
    if (!result) references++;
    return leave(result);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    int result = enter(NULL, "nvmlShutdown");
    if (!result) references--;
    return leave(result);
}

const char *nvmlErrorString(int code) {
    return code == 999 ? "Unknown Error" : "an error of the simulator";
}

/* The machine's own values are signals of the device in position 0. */
static int read_text(const char *function, const char *signal, char *out, unsigned size) {
    double value = 0;
    int result = enter(NULL, function);
    if (!result) result = num_devices ? reading(&devices[0], signal, &value) : NOT_SUPPORTED;
    if (!result) snprintf(out, size, "%.2f", value);
    return leave(result);
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    return read_text("nvmlSystemGetDriverVersion", "driver", out, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    double value = 0;
    int result = enter(NULL, "nvmlSystemGetCudaDriverVersion_v2");
    if (!result) result = num_devices ? reading(&devices[0], "cuda", &value) : NOT_SUPPORTED;
    *out = (int)value;
    return leave(result);
}

static Device *nth_child(int parent, unsigned wanted) {
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent == parent && wanted-- == 0) return &devices[i];
    return NULL;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int result = enter(NULL, "nvmlDeviceGetCount_v2");
    if (!result)
        for (*count = 0; nth_child(NO_DEVICE, *count);) ++*count;
    return leave(result);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    int result = enter(NULL, "nvmlDeviceGetHandleByIndex_v2");
    if (!result && !(*out = nth_child(NO_DEVICE, index))) result = INVALID_ARGUMENT;
    if (!result) result = follow_rules((int)(*out - devices), "nvmlDeviceGetHandleByIndex_v2", 1);
    return leave(result);
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) {
    return copy_text(device, "nvmlDeviceGetUUID", device->uuid, out, size);
}

int nvmlDeviceGetName(Device *device, char *out, unsigned size) {
    return copy_text(device, "nvmlDeviceGetName", device->name, out, size);
}

typedef struct { char legacy[16]; unsigned domain, bus, slot, id, subsystem; char bus_id[32]; } PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) {
    int result = enter(device, "nvmlDeviceGetPciInfo_v3");
    if (!result) {
        memset(out, 0, sizeof *out);
        sscanf(device->pci, "%x:%x:%x", &out->domain, &out->bus, &out->slot);
        memcpy(out->bus_id, device->pci, sizeof out->bus_id);
    }
    return leave(result);
}

int nvmlDeviceGetArchitecture(Device *device, unsigned *out) {
    int result = enter(device, "nvmlDeviceGetArchitecture");
    *out = device->architecture;
    return leave(result);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) {
    int result = enter(device, "nvmlDeviceGetMaxMigDeviceCount");
    *out = nth_child((int)(device - devices), 0) ? 7 : 0;
    return leave(result);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    int result = enter(device, "nvmlDeviceGetMigDeviceHandleByIndex");
    if (!result && !(*out = nth_child((int)(device - devices), index))) result = NOT_FOUND;
    return leave(result);
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out) {
    int result = enter(device, "nvmlDeviceGetGpuInstanceId");
    if (!result && device->parent == NO_DEVICE) result = INVALID_ARGUMENT;
    *out = device->gpu_instance;
    return leave(result);
}

/* ---- readings ---- */

typedef struct { unsigned gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    double gpu = 0, memory = 0;
    int result = enter(device, "nvmlDeviceGetUtilizationRates");
    if (!result) result = reading(device, "utilization", &gpu);
    if (!result) reading(device, "memory_utilization", &memory);
    *out = (Utilization){(unsigned)gpu, (unsigned)memory};
    return leave(result);
}

typedef union { double real; unsigned whole; unsigned long long large; } Value;
typedef struct { unsigned long long time_us; Value value; } BufferEntry;

static int type_or(int device, int usual) {
    int odd = follow_rules(device, "values.type", 0);
    return odd ? odd : usual;
}

int nvmlDeviceGetSamples(Device *device, int kind, unsigned long long after_us, int *type, unsigned *count,
                         BufferEntry *out) {
    int result = enter(device, "nvmlDeviceGetSamples"), index = (int)(device - devices);
    unsigned found = 0, known = 0;
    if (result) return leave(result);
    if (!out) device->drains++;  /* the call that asks for the size opens a drain */
    for (int i = 0; i < num_samples; i++) {
        if (samples[i].device != index || kind != 1) continue;
        known = 1;
        if (samples[i].time_us <= after_us || samples[i].drain >= device->drains) continue;
        if (out && found < *count) out[found] = (BufferEntry){samples[i].time_us, {.whole = samples[i].value}};
        found++;
    }
    *type = type_or(index, 1);
    if (out && found > *count) return leave(INSUFFICIENT_SIZE);
    *count = found;
    int odd = !found && follow_rules(index, "samples.empty", 0);
    return leave(!known ? NOT_SUPPORTED : found || odd ? SUCCESS : NOT_FOUND);
}

typedef struct { unsigned long long total, free, used; } MemoryV1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

static int read_memory(Device *device, double *total, double *reserved, double *used) {
    int result = reading(device, "memory_total", total);
    if (!result) result = reading(device, "memory_used", used);
    if (!result) reading(device, "memory_reserved", reserved);
    return result;
}

int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *out) {
    double total = 0, reserved = 0, used = 0;
    int result = enter(device, "nvmlDeviceGetMemoryInfo");
    if (!result) result = read_memory(device, &total, &reserved, &used);
    if (!result) *out = (MemoryV1){total, total - used - reserved, used + reserved};
    return leave(result);
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    double total = 0, reserved = 0, used = 0;
    int result = enter(device, "nvmlDeviceGetMemoryInfo_v2");
    if (!result && out->version != MEMORY_V2) result = VERSION_MISMATCH;
    if (!result) result = read_memory(device, &total, &reserved, &used);
    if (!result) *out = (MemoryV2){MEMORY_V2, total, reserved, total - used - reserved, used};
    return leave(result);
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *out) {
    char signal[40];
    snprintf(signal, sizeof signal, "nvlink.%u", link);
    return read_unsigned(device, "nvmlDeviceGetNvLinkState", signal, out);
}

/* "processes": all of its values are process ids, at each call. */
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    int result = enter(device, "nvmlDeviceGetComputeRunningProcesses_v3");
    Trace *trace = result ? NULL : find_trace((int)(device - devices), "processes");
    unsigned found = trace ? trace->count : 0;
    if (!result && found > *count) result = INSUFFICIENT_SIZE;
    for (unsigned i = 0; !result && i < found; i++) out[i] = (Process){(unsigned)trace->values[i], 1 << 20, 0, 0};
    *count = found;
    return leave(result);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *out) {
    return read_unsigned(device, "nvmlDeviceGetPowerUsage", "power", out);
}

#define UNSIGNED_READING(function, signal) \
    int function(Device *device, unsigned *out) { return read_unsigned(device, #function, signal, out); }

UNSIGNED_READING(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_default")
UNSIGNED_READING(nvmlDeviceGetPersistenceMode, "persistence")
UNSIGNED_READING(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
UNSIGNED_READING(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max")
UNSIGNED_READING(nvmlDeviceGetCurrPcieLinkWidth, "pcie_lanes")
UNSIGNED_READING(nvmlDeviceGetMaxPcieLinkWidth, "pcie_lanes_max")

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    int result = read_unsigned(device, "nvmlDeviceGetMigMode", "mig_mode", current);
    *pending = *current;
    return result;
}

int nvmlDeviceGetEccMode(Device *device, unsigned *current, unsigned *pending) {
    int result = read_unsigned(device, "nvmlDeviceGetEccMode", "ecc_mode", current);
    *pending = *current;
    return result;
}

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *out) {
    return read_unsigned(device, "nvmlDeviceGetEnforcedPowerLimit", "power_limit", out);
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *out) {
    (void)sensor;
    return read_unsigned(device, "nvmlDeviceGetTemperature", "temperature", out);
}

typedef struct { unsigned version; int sensor; int temperature; } Temperature;

int nvmlDeviceGetTemperatureV(Device *device, Temperature *out) {
    return read_unsigned(device, "nvmlDeviceGetTemperatureV", "temperature", (unsigned *)&out->temperature);
}

int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *out) {
    return read_unsigned(device, "nvmlDeviceGetClockInfo", type == 1 ? "sm_clock" : type == 2 ? "mem_clock" : "", out);
}

int nvmlDeviceGetMaxClockInfo(Device *device, int type, unsigned *out) {
    return read_unsigned(device, "nvmlDeviceGetMaxClockInfo", type == 1 ? "sm_clock_max" : "", out);
}

static int read_large(Device *device, const char *function, const char *signal, unsigned long long *out) {
    double value = 0;
    int result = enter(device, function);
    if (!result) result = reading(device, signal, &value);
    *out = (unsigned long long)value;
    return leave(result);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *out) {
    return read_large(device, "nvmlDeviceGetCurrentClocksEventReasons", "clock_reasons", out);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *out) {
    return read_large(device, "nvmlDeviceGetCurrentClocksThrottleReasons", "clock_reasons", out);
}

int nvmlDeviceGetTotalEccErrors(Device *device, int error, int counter, unsigned long long *out) {
    return read_large(device, "nvmlDeviceGetTotalEccErrors", error == 1 && counter == 0 ? "ecc" : "", out);
}

int nvmlDeviceGetPcieThroughput(Device *device, int counter, unsigned *out) {
    return read_unsigned(device, "nvmlDeviceGetPcieThroughput", counter ? "pcie_rx" : "pcie_tx", out);
}

int nvmlDeviceGetDecoderUtilization(Device *device, unsigned *out, unsigned *period_us) {
    *period_us = 167000;
    return read_unsigned(device, "nvmlDeviceGetDecoderUtilization", "decoder", out);
}

int nvmlDeviceGetJpgUtilization(Device *device, unsigned *out, unsigned *period_us) {
    *period_us = 167000;
    return read_unsigned(device, "nvmlDeviceGetJpgUtilization", "jpeg", out);
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    int type, result;
    Value value;
} FieldValue;

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    int result = enter(device, "nvmlDeviceGetFieldValues");
    for (int i = 0; !result && i < count; i++) {
        char signal[40];
        double value = 0;
        snprintf(signal, sizeof signal, "field.%u.%u", values[i].field, values[i].scope);
        values[i].result = reading(device, signal, &value);
        values[i].type = type_or((int)(device - devices), 3);
        values[i].value.large = (unsigned long long)value;
    }
    return leave(result);
}

/* ---- GPM ---- */

typedef struct { unsigned version, supported; } GpmSupport;
typedef struct { unsigned id; int result; double value; const char *short_name, *long_name, *unit; } GpmMetric;
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;

int nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *out) {
    int result = enter(device, "nvmlGpmQueryDeviceSupport");
    out->supported = device->architecture >= 9;
    return leave(result);
}

int nvmlGpmSampleAlloc(GpmSample **out) {
    int result = enter(NULL, "nvmlGpmSampleAlloc");
    if (!result && (*out = calloc(1, sizeof **out))) gpm_alive++;
    return leave(result);
}

int nvmlGpmSampleFree(GpmSample *sample) {
    int result = enter(NULL, "nvmlGpmSampleFree");
    if (!result) gpm_alive--, free(sample);
    return leave(result);
}

static int fill_sample(Device *device, GpmSample *out) {
    int index = (int)(device - devices);
    if (!has_gpm(index)) return NOT_SUPPORTED;
    *out = (GpmSample){index, ++device->gpm_samples};
    return SUCCESS;
}

int nvmlGpmSampleGet(Device *device, GpmSample *out) {
    int result = enter(device, "nvmlGpmSampleGet");
    if (!result) result = fill_sample(device, out);
    return leave(result);
}

int nvmlGpmMigSampleGet(Device *device, unsigned gpu_instance, GpmSample *out) {
    int result = enter(device, "nvmlGpmMigSampleGet");
    if (result) return leave(result);
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent == (int)(device - devices) && devices[i].gpu_instance == gpu_instance)
            return leave(fill_sample(&devices[i], out));
    return leave(INVALID_ARGUMENT);
}

/* The k-th value of the trace is that of the window between the k-th sample and the next; a longer span is their mean. */
static int gpm_value(int device, unsigned id, unsigned first, unsigned second, double *out) {
    char signal[32];
    snprintf(signal, sizeof signal, "gpm.%u", id);
    Trace *trace = find_trace(device, signal);
    if (!trace || !trace->count) return NOT_SUPPORTED;
    double sum = 0;
    for (unsigned k = first; k < second; k++) sum += trace->values[k <= trace->count ? k - 1 : trace->count - 1];
    *out = sum / (second - first);
    return follow_rules(device, signal, 0);
}

int nvmlGpmMetricsGet(GpmMetrics *query) {
    pthread_mutex_lock(&lock);
    int known = query->first && query->second;
    pthread_mutex_unlock(&lock);
    int result = enter(known ? &devices[query->second->device] : NULL, "nvmlGpmMetricsGet");
    if (!result && query->version != 1) result = VERSION_MISMATCH;
    if (!result && (!known || query->first->device != query->second->device ||
                    query->first->number == 0 || query->first->number >= query->second->number))
        result = INVALID_ARGUMENT;
    for (unsigned i = 0; !result && i < query->count; i++)
        query->metrics[i].result = gpm_value(query->second->device, query->metrics[i].id, query->first->number,
                                             query->second->number, &query->metrics[i].value);
    return leave(result);
}
