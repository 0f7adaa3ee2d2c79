#include "chat_mute.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

int chat_mute(void)
{
    pthread_mutex_lock(&mutex);
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    int before = nowhere >= 0 ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3) : -1;
    if (before >= 0) dup2(nowhere, STDERR_FILENO);
    if (nowhere >= 0) close(nowhere);
    return before;
}

void chat_unmute(int before)
{
    if (before >= 0) {
        dup2(before, STDERR_FILENO);
        close(before);
    }
    pthread_mutex_unlock(&mutex);
}
