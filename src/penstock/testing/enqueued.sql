-- The jobs of a type that wait or run, and whose payload contains a document; null stands for any payload.
select job.id, job.key, job.priority, job.run_after, job.data::text as data
from penstock.queued_jobs as job
where
    job.name = {0}
    and case when cast({1} as jsonb) = 'null' then true else job.data @> cast({1} as jsonb) end
order by job.created_at, job.id
limit 1000
