/* ui.c: the page from its three parts, which the build turns into ui_page.h (cmake/embed.cmake). Nothing from outside
 * is loaded, and nothing runs but the parts themselves: style and script carry a number that is new with each reply,
 * and the policy names it. */
#include "ui.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "ui_page.h"

enum { NONCE_BYTES = 16 };

static const char policy_form[] =
    "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static void fill(oai_buffer *b, const char *nonce)
{
    const struct {
        const char *name, *text;
        size_t n;
    } parts[] = {{"@NONCE@", nonce, strlen(nonce)},
                 {"@STYLE@", ui_css, sizeof ui_css - 1},
                 {"@SCRIPT@", ui_js, sizeof ui_js - 1}};
    const char *at = ui_html;
    for (const char *next; (next = strchr(at, '@')) != NULL;) {
        size_t i = 0;
        while (i < 3 && strncmp(next, parts[i].name, strlen(parts[i].name))) i++;
        oai_buffer_add(b, at, (size_t)(next - at) + (i == 3));
        if (i < 3) oai_buffer_add(b, parts[i].text, parts[i].n);
        at = next + (i < 3 ? strlen(parts[i].name) : 1);
    }
    oai_buffer_add(b, at, strlen(at));
}

void ui_handle(void *user, http_request *r, http_reply *out)
{
    unsigned char random[NONCE_BYTES];
    char nonce[2 * NONCE_BYTES + 1];
    (void)user;
    (void)r;
    size_t room = sizeof policy_form + 2 * sizeof nonce;
    if (getrandom(random, sizeof random, 0) != sizeof random || !(out->policy = malloc(room))) {
        oai_error e = {0};
        oai_fail(&e, 500, "out_of_memory", NULL, "out of memory");
        http_error(out, &e);
        return;
    }
    for (size_t i = 0; i < NONCE_BYTES; i++) snprintf(nonce + 2 * i, 3, "%02x", random[i]);
    snprintf(out->policy, room, policy_form, nonce, nonce);
    out->status = 200;
    out->type = "text/html; charset=utf-8";
    fill(&out->body, nonce);
}
