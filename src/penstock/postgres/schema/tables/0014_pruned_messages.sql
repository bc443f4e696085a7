-- Messages are pruned when nothing refers to them any more, which is not the order of their numbers. So that nobody who goes on
-- from a number misses one between two that are there, each topic notes up to where some are gone.

alter table penstock.topics add column pruned_seq bigint not null default 0;
comment on column penstock.topics.pruned_seq is 'Number of the last message that was pruned; all later ones are there.';

update penstock.topics as topic
set pruned_seq = gap.seq
from (
    select there.topic, max(there.after - 1) as seq
    from (
        select
            every.topic, every.seq as after,
            every.seq - lag(every.seq, 1, 0::bigint) over (partition by every.topic order by every.seq) as step
        from (
            select topic, seq from penstock.topic_messages
            union all
            select name, last_seq + 1 from penstock.topics
        ) as every
    ) as there
    where there.step > 1
    group by there.topic
) as gap
where topic.name = gap.topic;
