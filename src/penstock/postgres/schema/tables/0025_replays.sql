-- The replays of a job can be found from the job.

create index queued_jobs_replays on penstock.queued_jobs (replay_of) where replay_of is not null;
create index archived_jobs_replays on penstock.archived_jobs (replay_of) where replay_of is not null;

drop function if exists penstock.replay(uuid, uuid, jsonb);
drop function if exists penstock.find_jobs(uuid[]);
drop function if exists penstock.stored_jobs(uuid[]);
