#include "chat_mute.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t n_mutes;
static int before = -1; /* standard error as it was; -1: nothing was done */

void chat_mute(void)
{
    pthread_mutex_lock(&mutex);
    if (n_mutes++ == 0) {
        int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
        before = nowhere >= 0 ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3) : -1;
        if (before >= 0) dup2(nowhere, STDERR_FILENO);
        if (nowhere >= 0) close(nowhere);
    }
    pthread_mutex_unlock(&mutex);
}

void chat_unmute(void)
{
    pthread_mutex_lock(&mutex);
    if (--n_mutes == 0 && before >= 0) {
        dup2(before, STDERR_FILENO);
        close(before);
        before = -1;
    }
    pthread_mutex_unlock(&mutex);
}
