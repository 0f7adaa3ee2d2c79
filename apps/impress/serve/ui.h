/* ui.h: the page at /ui. It holds no data of its own: it asks /metrics and /admin/ with the key that its user enters.
 */
#ifndef SERVE_UI_H
#define SERVE_UI_H

#include "http.h"

void ui_handle(void *user, http_request *r, http_reply *out);

#endif
