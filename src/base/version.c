#include "impress/impress.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *imp_version(void)
{
    return TEXT(IMP_VERSION_MAJOR) "." TEXT(IMP_VERSION_MINOR) "." TEXT(IMP_VERSION_PATCH);
}
