/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for libflagcx.so on one host, for tests: the functions that tandem calls, with either
 * binary interface (-DSTUB_ABI=12 for releases up to 0.12, -DSTUB_ABI=13 from 0.13). "Device"
 * memory is host memory and streams do nothing, but for FLAGCX_STUB_CUDA=1, where both are CUDA's;
 * ranks meet in shared memory and copy in pieces.
 * What hangs in the real library hangs here: connecting and broadcasting without a peer, and
 * destroying a heterogeneous communicator that a peer does not destroy.
 *
 * Environment of each process: FLAGCX_STUB_VENDOR is its vendor; FLAGCX_STUB_FAIL=function:result
 * lets a function fail; FLAGCX_STUB_CORRUPT=1 lets it receive other bytes than were sent, as 0.13
 * does through the host.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_RANKS 64
#define PIECE_BYTES (1u << 20)
#define SYSTEM_ERROR 2
#define INVALID_ARGUMENT 4
#define NOT_SUPPORTED 9

typedef struct {
  char internal[256];
} UniqueId;
typedef struct {
  atomic_int ready;
  pthread_barrier_t barrier;
  char vendor[MAX_RANKS][32];
  char piece[PIECE_BYTES];
} Shared;
typedef struct {
  int rank, size, is_homogeneous;
  Shared *shared;
} Comm;
typedef struct {
  void *base;
} Stream;

static atomic_int copied, freed;
static __thread int last_device = -1;

static int failure_of(const char *function) {
  const char *wanted = getenv("FLAGCX_STUB_FAIL");
  size_t length = strlen(function);
  if (!wanted || strncmp(wanted, function, length) || wanted[length] != ':')
    return 0;
  return atoi(wanted + length + 1);
}
#define FAIL_IF_ASKED()                                                                            \
  do {                                                                                             \
    int failure = failure_of(__func__);                                                            \
    if (failure)                                                                                   \
      return failure;                                                                              \
  } while (0)

/* Of CUDA's driver, so that the stub builds without CUDA. */
static int cuda(const char *function, void *first, void *second, size_t third, void *fourth) {
  static void *driver;
  if (!driver && !(driver = dlopen("libcuda.so.1", RTLD_NOW)))
    return SYSTEM_ERROR;
  int (*call)(void *, void *, size_t, void *) = dlsym(driver, function);
  return call && !call(first, second, third, fourth) ? 0 : SYSTEM_ERROR;
}
static int use_cuda_device(int index) {
  void *context;
  int failure = cuda("cuInit", 0, 0, 0, 0);
  failure |= cuda("cuDevicePrimaryCtxRetain", &context, (void *)(long)index, 0, 0);
  return failure | cuda("cuCtxSetCurrent", context, 0, 0, 0);
}
static void linger(void *unused) {
  (void)unused;
  usleep(50000);
}
/* Only queued when this returns. */
static int copy_to_cuda(void *to, void *from, size_t bytes, Stream *stream) {
  return cuda("cuLaunchHostFunc", stream->base, linger, 0, 0) |
         cuda("cuMemcpyAsync", to, from, bytes, stream->base);
}
static int copy_from_cuda(void *to, const void *from, size_t bytes, Stream *stream) {
  return cuda("cuMemcpyAsync", to, (void *)from, bytes, stream->base) |
         cuda("cuStreamSynchronize", stream->base, 0, 0, 0);
}

/* The table of device functions. */
static int unused(void) { return NOT_SUPPORTED; }
static int setDevice(int index) {
  FAIL_IF_ASKED();
  last_device = index;
  return getenv("FLAGCX_STUB_CUDA") ? use_cuda_device(index) : 0;
}
static int getVendor(char *vendor) {
  FAIL_IF_ASKED();
  const char *name = getenv("FLAGCX_STUB_VENDOR");
  snprintf(vendor, 32, "%s", name ? name : "STUB");
  return 0;
}
static int streamCopy(Stream **stream, void *base) {
  FAIL_IF_ASKED();
  *stream = calloc(1, sizeof **stream);
  (*stream)->base = base;
  copied++;
  return 0;
}
static int streamFree(Stream *stream) {
  FAIL_IF_ASKED();
  free(stream);
  freed++;
  return 0;
}
typedef struct {
  void *before_set_device[5];
  int (*setDevice)(int);
  void *before_vendor[2];
  int (*getVendor)(char *);
  void *before_stream_copy[3];
  int (*streamCopy)(Stream **, void *);
  int (*streamFree)(Stream *);
  void *rest[16];
} DeviceHandle;
static DeviceHandle device_handle = {
    .before_set_device = {unused, unused, unused, unused, unused},
    .setDevice = setDevice,
    .before_vendor = {unused, unused},
    .getVendor = getVendor,
    .before_stream_copy = {unused, unused, unused},
    .streamCopy = streamCopy,
    .streamFree = streamFree,
};

/* Handles and ids: where the two interfaces differ. */
typedef struct {
  UniqueId *unique_id;
  Comm *comm;
  DeviceHandle *device;
} HandlerGroup;

int flagcxHandleInit(HandlerGroup **group) {
  FAIL_IF_ASKED();
  *group = calloc(1, sizeof **group);
  (*group)->device = &device_handle;
  return 0;
}

static int make_id(UniqueId *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/flagcx_stub_%d_%lx", getpid(), (long)id ^ random());
  int file = shm_open(id->internal, O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)))
    return SYSTEM_ERROR;
  close(file);
  return 0;
}

#if STUB_ABI >= 13
int flagcxDeviceHandleInit(DeviceHandle **handle) {
  FAIL_IF_ASKED();
  *handle = &device_handle;
  return 0;
}
int flagcxGetUniqueId(UniqueId *id) {
  FAIL_IF_ASKED();
  return make_id(id);
}
#else
int flagcxGetUniqueId(UniqueId **id) {
  FAIL_IF_ASKED();
  *id = calloc(1, sizeof **id);
  return make_id(*id);
}
#endif

/* The same constant as the real one's, in every release. */
int flagcxGetVersion(int *version) {
  *version = 10000;
  return 0;
}
const char *flagcxGetErrorString(int result) {
  (void)result;
  return "Not implemented.";
}
const char *flagcxGetLastError(Comm *comm) {
  return comm->is_homogeneous ? "the vendor's own words" : "Not implemented.";
}
int flagcxCommRegister(Comm *comm, void *buffer, size_t size, void **handle) {
  (void)comm, (void)buffer, (void)size, (void)handle;
  return NOT_SUPPORTED;
}

int flagcxCommInitRank(Comm **comm, int size, UniqueId *id, int rank) {
  FAIL_IF_ASKED();
  if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size || last_device < 0)
    return INVALID_ARGUMENT;
  int file = shm_open(id->internal, O_RDWR, 0600);
  if (file < 0)
    return SYSTEM_ERROR;
  Comm *made = calloc(1, sizeof *made);
  made->rank = rank;
  made->size = size;
  made->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  Shared *shared = made->shared;
  if (rank == 0) {
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, size);
    atomic_store(&shared->ready, 1);
  }
  while (!atomic_load(&shared->ready))
    usleep(500);
  getVendor(shared->vendor[rank]);
  pthread_barrier_wait(&shared->barrier);
  if (rank == 0)
    shm_unlink(id->internal);
  made->is_homogeneous = 1;
  for (int i = 1; i < size; i++)
    made->is_homogeneous &= !strcmp(shared->vendor[i], shared->vendor[0]);
  *comm = made;
  return 0;
}

int flagcxIsHomoComm(Comm *comm, int *answer) {
  FAIL_IF_ASKED();
  *answer = comm->is_homogeneous;
  return 0;
}

int flagcxBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm,
                    Stream *stream) {
  static const size_t size_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  FAIL_IF_ASKED();
  if (type < 0 || type > 9 || root < 0 || root >= comm->size)
    return INVALID_ARGUMENT;
  int failure = 0, is_cuda = getenv("FLAGCX_STUB_CUDA") != 0, sends = comm->rank == root;
  size_t bytes = count * size_of[type];
  char *source = (char *)from, *target = to;
  if (is_cuda) { /* page-locked memory, never freed: copies from it may be under way */
    failure |= cuda("cuMemHostAlloc", &target, (void *)(bytes + 1), 0, 0);
    source = target;
    if (sends)
      failure |= copy_from_cuda(source, from, bytes, stream);
  }
  for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
    size_t piece = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES;
    if (sends)
      memcpy(comm->shared->piece, source + done, piece);
    pthread_barrier_wait(&comm->shared->barrier);
    if (!sends || from != to)
      memcpy(target + done, comm->shared->piece, piece);
    pthread_barrier_wait(&comm->shared->barrier);
  }
  if (getenv("FLAGCX_STUB_CORRUPT") && !sends && bytes)
    memset(target, 0, bytes);
  if (is_cuda && !sends)
    failure |= copy_to_cuda(to, target, bytes, stream);
  return failure;
}

int flagcxCommAbort(Comm *comm) {
  FAIL_IF_ASKED();
  return comm->is_homogeneous ? 0 : NOT_SUPPORTED;
}
int flagcxCommDestroy(Comm *comm) {
  FAIL_IF_ASKED();
  if (!comm->is_homogeneous)
    pthread_barrier_wait(&comm->shared->barrier);
  munmap(comm->shared, sizeof(Shared));
  free(comm);
  return 0;
}

/* How many streams this process has copied, and freed. */
void stub_counters(int *num_copied, int *num_freed) {
  *num_copied = copied;
  *num_freed = freed;
}
