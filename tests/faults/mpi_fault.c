/* Faults in messages: a library to preload into the ranks of a run (LD_PRELOAD).
 *
 *     GYRE_FAULT="corrupt rank=2 message=17 byte=5 bit=3"   one bit of the payload is flipped
 *     GYRE_FAULT="scramble rank=2 message=17"               all bits of the payload are flipped
 *     GYRE_FAULT="truncate rank=2 message=17"               the second half does not arrive
 *     GYRE_FAULT="drop rank=2 message=17"                   it does not arrive at all
 *     GYRE_FAULT="delay rank=2 message=17 ms=300"           the rank sends it, and goes on, later
 *     GYRE_FAULT="fail rank=2 message=17"                   the call returns an error on this rank
 *     GYRE_FAULT="memory rank=2 message=17"                 the next C++ allocation fails
 *     GYRE_FAULT="count"                                    nothing; messages are listed
 *     GYRE_FAULT_LOG=FOLDER                                 FOLDER/rank.<r> tells what was done
 *
 * A message is what this rank contributes to one call of a non-blocking operation that moves bytes
 * to other ranks: a send, or its share of a collective. They are numbered from 0 by rank, in the
 * order of the calls. Operations without bytes, to the rank itself or over one rank do not count.
 * Those inside HDF5 and MPI-IO do, when they are non-blocking: collective writes exchange data.
 *
 * A contribution is struck before the library sees it, so that all its receivers get the same. Of a
 * collective, the half that does not arrive reads as zeros, and a dropped one never completes on
 * this rank either: the library itself would not survive unequal counts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum Mode { unread, none, count, corrupt, scramble, truncate_half, drop, delay, fail, memory };

static struct {
  enum Mode mode;
  long rank, message, byte, bit, ms;
} fault;
static long my_rank, messages;
static __thread int starved;
static FILE* log_file;

static long number_of(const char* text, const char* key) {
  const char* at = strstr(text, key);
  return at == NULL ? 0 : atol(at + strlen(key));
}

static void read_fault(void) {
  static const char* const names[] = {"count", "corrupt", "scramble", "truncate",
                                      "drop",  "delay",   "fail",     "memory"};
  const char* text = getenv("GYRE_FAULT");
  const char* folder = getenv("GYRE_FAULT_LOG");
  const char* rank = getenv("PMI_RANK");
  fault.mode = none;
  if (text == NULL || rank == NULL) return;
  for (int i = 0; i < 8; ++i)
    if (strncmp(text, names[i], strlen(names[i])) == 0) fault.mode = (enum Mode)(count + i);
  if (fault.mode == none) {
    fprintf(stderr, "mpi_fault: GYRE_FAULT=\"%s\" is no fault\n", text);
    abort();
  }
  fault.rank = number_of(text, "rank=");
  fault.message = number_of(text, "message=");
  fault.byte = number_of(text, "byte=");
  fault.bit = number_of(text, "bit=");
  fault.ms = number_of(text, "ms=");
  my_rank = atol(rank);
  if (folder == NULL) return;
  char path[4096];
  snprintf(path, sizeof(path), "%s/rank.%ld", folder, my_rank);
  log_file = fopen(path, "w");
}

/* The calls that led here, as offsets in the program, innermost first: addr2line names them. */
static void log_callers(void) {
  void* frames[48];
  const int n = backtrace(frames, 48);
  for (int i = 0; i < n; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_fname == NULL) continue;
    if (strstr(info.dli_fname, program_invocation_short_name) == NULL) continue;
    fprintf(log_file, " %#lx", (unsigned long)((char*)frames[i] - (char*)info.dli_fbase) - 1);
  }
}

/* Counts a message of `bytes`. True when it is to be struck; a delay is done here. */
static int strikes(const char* call, long bytes, MPI_Comm comm) {
  int size = 1;
  PMPI_Comm_size(comm, &size);
  if (fault.mode == unread) read_fault();
  if (fault.mode == none || bytes <= 0 || size == 1) return 0;
  const long index = messages++;
  const int struck = fault.mode != count && my_rank == fault.rank && index == fault.message;
  if (log_file != NULL && (struck || fault.mode == count)) {
    fprintf(log_file, "%ld %s %ld %d", index, call, bytes, size);
    if (struck) log_callers();
    fprintf(log_file, "\n");
    fflush(log_file);
  }
  if (struck && fault.mode == delay) {
    const struct timespec pause = {fault.ms / 1000, fault.ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
    return 0;
  }
  starved = struck && fault.mode == memory;
  return struck && !starved;
}

/* operator new(size_t). Programs in C have no such allocations. */
void _ZSt17__throw_bad_allocv(void) __attribute__((weak));
void* _Znwm(size_t bytes) {
  if (starved) {
    starved = 0;
    _ZSt17__throw_bad_allocv();
  }
  void* block = malloc(bytes == 0 ? 1 : bytes);
  if (block == NULL) _ZSt17__throw_bad_allocv();
  return block;
}

static long bytes_of(int elements, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return (long)elements * size;
}

/* A copy of the payload that outlives the operation: one a run. */
static char* copy_of(const void* data, long bytes) {
  char* copy = malloc((size_t)bytes + 1);
  if (copy == NULL) abort();
  if (data != NULL) memcpy(copy, data, (size_t)bytes);
  return copy;
}

static void flip(char* data, long bytes) {
  if (fault.mode == corrupt) data[fault.byte % bytes] ^= (char)(1 << fault.bit % 8);
  for (long i = 0; fault.mode == scramble && i < bytes; ++i) data[i] = (char)~data[i];
}

/* A contiguous contribution to a collective, struck. */
static void* struck_copy(const void* data, long bytes) {
  char* copy = copy_of(data, bytes);
  flip(copy, bytes);
  if (fault.mode == truncate_half) memset(copy + bytes / 2, 0, (size_t)(bytes - bytes / 2));
  return copy;
}

/* Faults without a message. */
static int is_lost(void) {
  return fault.mode == drop || fault.mode == fail;
}

/* An operation that fails, or never completes here. */
static int lose(MPI_Request* request) {
  static char nothing;
  if (fault.mode == fail) return MPI_ERR_OTHER;
  return PMPI_Irecv(&nothing, 1, MPI_BYTE, 0, 4711, MPI_COMM_SELF, request);
}

int MPI_Isend(const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  int self = 0, position = 0;
  PMPI_Comm_rank(comm, &self);
  const long bytes = bytes_of(n, type);
  if (to == self || to == MPI_PROC_NULL || !strikes("isend", bytes, comm))
    return PMPI_Isend(data, n, type, to, tag, comm, request);
  if (fault.mode == fail) return lose(request);
  if (fault.mode == drop) return PMPI_Isend(NULL, 0, MPI_BYTE, MPI_PROC_NULL, tag, comm, request);
  char* packed = copy_of(NULL, bytes);
  PMPI_Pack(data, n, type, packed, (int)bytes, &position, comm);
  flip(packed, bytes);
  const int sent = (int)(fault.mode == truncate_half ? bytes / 2 : bytes);
  return PMPI_Isend(packed, sent, MPI_BYTE, to, tag, comm, request);
}

int MPI_Iallgather(const void* send, int n, MPI_Datatype type, void* recv, int each,
                   MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  if (strikes("iallgather", bytes_of(n, type), comm)) {
    if (is_lost()) return lose(request);
    send = struck_copy(send, bytes_of(n, type));
  }
  return PMPI_Iallgather(send, n, type, recv, each, recv_type, comm, request);
}

int MPI_Iallgatherv(const void* send, int n, MPI_Datatype type, void* recv, const int counts[],
                    const int offsets[], MPI_Datatype recv_type, MPI_Comm comm,
                    MPI_Request* request) {
  if (strikes("iallgatherv", bytes_of(n, type), comm)) {
    if (is_lost()) return lose(request);
    send = struck_copy(send, bytes_of(n, type));
  }
  return PMPI_Iallgatherv(send, n, type, recv, counts, offsets, recv_type, comm, request);
}

int MPI_Iallreduce(const void* send, void* recv, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request* request) {
  if (strikes("iallreduce", bytes_of(n, type), comm)) {
    if (is_lost()) return lose(request);
    send = struck_copy(send == MPI_IN_PLACE ? recv : send, bytes_of(n, type));
  }
  return PMPI_Iallreduce(send, recv, n, type, op, comm, request);
}

int MPI_Ireduce_scatter_block(const void* send, void* recv, int each, MPI_Datatype type, MPI_Op op,
                              MPI_Comm comm, MPI_Request* request) {
  int size = 1;
  PMPI_Comm_size(comm, &size);
  const long bytes = size * bytes_of(each, type);
  if (strikes("ireduce_scatter", bytes, comm)) {
    if (is_lost()) return lose(request);
    send = struck_copy(send == MPI_IN_PLACE ? recv : send, bytes);
  }
  return PMPI_Ireduce_scatter_block(send, recv, each, type, op, comm, request);
}

int MPI_Ibcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request) {
  int self = 0;
  PMPI_Comm_rank(comm, &self);
  if (self == root && strikes("ibcast", bytes_of(n, type), comm)) {
    if (is_lost()) return lose(request);
    data = struck_copy(data, bytes_of(n, type));
  }
  return PMPI_Ibcast(data, n, type, root, comm, request);
}

/* Strikes what goes to other ranks: `bytes` in all, in rank order. */
static void* struck_parts(const void* send, const int counts[], const int offsets[], long element,
                          int self, int size, long bytes) {
  long extent = 0, passed = 0;
  for (int r = 0; r < size; ++r)
    if ((offsets[r] + (long)counts[r]) * element > extent)
      extent = (offsets[r] + (long)counts[r]) * element;
  char* copy = copy_of(send, extent);
  for (int r = 0; r < size; ++r) {
    for (long b = 0; r != self && b < counts[r] * element; ++b, ++passed) {
      char* at = copy + offsets[r] * element + b;
      if (fault.mode == corrupt && passed == fault.byte % bytes) *at ^= (char)(1 << fault.bit % 8);
      if (fault.mode == scramble) *at = (char)~*at;
      if (fault.mode == truncate_half && passed >= bytes / 2) *at = 0;
    }
  }
  return copy;
}

int MPI_Ialltoallv(const void* send, const int counts[], const int offsets[], MPI_Datatype type,
                   void* recv, const int recv_counts[], const int recv_offsets[],
                   MPI_Datatype recv_type, MPI_Comm comm, MPI_Request* request) {
  int self = 0, size = 1;
  long bytes = 0;
  PMPI_Comm_rank(comm, &self);
  PMPI_Comm_size(comm, &size);
  for (int r = 0; r < size; ++r)
    if (r != self) bytes += bytes_of(counts[r], type);
  if (strikes("ialltoallv", bytes, comm)) {
    if (is_lost()) return lose(request);
    send = struck_parts(send, counts, offsets, bytes_of(1, type), self, size, bytes);
  }
  return PMPI_Ialltoallv(send, counts, offsets, type, recv, recv_counts, recv_offsets, recv_type,
                         comm, request);
}
