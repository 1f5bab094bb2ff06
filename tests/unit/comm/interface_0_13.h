/* SPDX-License-Identifier: Apache-2.0
 * What tandem uses of FlagCX's interface, as releases from 0.13 declare it. */
#include <stddef.h>

typedef enum { flagcxSuccess = 0 } flagcxResult_t;
typedef enum { flagcxUint8 = 1 } flagcxDataType_t;
typedef struct { char internal[256]; } flagcxUniqueId;
typedef flagcxUniqueId *flagcxUniqueId_t;
typedef struct flagcxComm *flagcxComm_t;
typedef struct flagcxStream *flagcxStream_t;
typedef struct flagcxEvent *flagcxEvent_t;
typedef int flagcxMemcpyType_t, flagcxMemType_t;

struct flagcxDeviceHandle {
  flagcxResult_t (*deviceSynchronize)();
  flagcxResult_t (*deviceMemcpy)(void *dst, void *src, size_t size, flagcxMemcpyType_t type,
                                 flagcxStream_t stream);
  flagcxResult_t (*deviceMemset)(void *ptr, int value, size_t size, flagcxMemType_t type,
                                 flagcxStream_t stream);
  flagcxResult_t (*deviceMalloc)(void **ptr, size_t size, flagcxMemType_t type,
                                 flagcxStream_t stream);
  flagcxResult_t (*deviceFree)(void *ptr, flagcxMemType_t type, flagcxStream_t stream);
  flagcxResult_t (*setDevice)(int dev);
  flagcxResult_t (*getDevice)(int *dev);
  flagcxResult_t (*getDeviceCount)(int *count);
  flagcxResult_t (*getVendor)(char *vendor);
  flagcxResult_t (*hostGetDevicePointer)(void **pDevice, void *pHost);
  flagcxResult_t (*streamCreate)(flagcxStream_t *stream);
  flagcxResult_t (*streamDestroy)(flagcxStream_t stream);
  flagcxResult_t (*streamCopy)(flagcxStream_t *newStream, void *oldStream);
  flagcxResult_t (*streamFree)(flagcxStream_t stream);
  flagcxResult_t (*streamSynchronize)(flagcxStream_t stream);
};
typedef struct flagcxDeviceHandle *flagcxDeviceHandle_t;

flagcxResult_t flagcxDeviceHandleInit(flagcxDeviceHandle_t *devHandle);
flagcxResult_t flagcxGetUniqueId(flagcxUniqueId_t uniqueId);
flagcxResult_t flagcxCommInitRank(flagcxComm_t *comm, int nranks, flagcxUniqueId_t commId,
                                  int rank);
flagcxResult_t flagcxIsHomoComm(flagcxComm_t comm, int *isHomo);
flagcxResult_t flagcxBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                               flagcxDataType_t datatype, int root, flagcxComm_t comm,
                               flagcxStream_t stream);
const char *flagcxGetLastError(flagcxComm_t comm);
flagcxResult_t flagcxCommAbort(flagcxComm_t comm);
flagcxResult_t flagcxCommDestroy(flagcxComm_t comm);
