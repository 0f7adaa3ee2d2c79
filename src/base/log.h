/* log.h: one line to the log function the user set (imp_log_set). Never pass prompt text or tokens. */
#ifndef IMP_BASE_LOG_H
#define IMP_BASE_LOG_H

#include "impress/impress.h"

void imp_log(imp_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
